package filecopy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// Default size of a server's window.
const (
	defaultChunk = 1 << 20
	defaultSlots = 8
)

// maxWindow bounds the memory that a client registers at a server's request.
const maxWindow = 256 << 20

// A window is the server's registered memory for one connection: Slots*Chunk bytes that the peer
// may read and write.
type window struct {
	Bytes  []byte
	Remote iwarp.Remote
	Chunk  int
	Slots  int
}

// Event reports a file that a server sent or received, or failed to.
type Event struct {
	Put  bool
	Name string
	Result
	Took time.Duration
	Err  error
}

// service is the server's side of an established connection.
type service struct {
	conn   conn
	store  *Store
	window window
	idle   time.Duration
	tell   func(Event) // called for each file

	// The names in a folder are cached for the next request of its list.
	folder string
	names  []string
}

// run serves the client until it disconnects, and then returns nil.
func (s *service) run(ctx context.Context) error {
	for {
		m, err := recv(ctx, s.conn, s.idle)
		if gone(err) {
			return nil
		}
		switch {
		case err != nil:
		case m.Kind == kindList:
			err = s.list(ctx, &m)
		case m.Kind == kindMkdir:
			if err = s.store.Mkdir(m.Name, m.options()); err == nil {
				err = send(ctx, s.conn, &message{Kind: kindOK})
			}
		default:
			began := time.Now()
			ev := Event{Put: m.Kind == kindPut, Name: m.Name}
			switch m.Kind {
			case kindGet:
				ev.Result, err = s.get(ctx, &m)
			case kindPut:
				ev.Result, err = s.put(ctx, &m)
			default:
				err = errTurn(&m)
			}
			ev.Took, ev.Err = time.Since(began), err
			s.tell(ev)
		}
		if err != nil {
			fail(ctx, s.conn, err)
			return err
		}
	}
}

// gone reports whether the peer closed the connection cleanly.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, iwarp.ErrPeerClosed)
}

// options returns the options of a put or a mkdir.
func (m *message) options() Options {
	return Options{Attrs{m.Mode, m.Mtime}, m.Flags&flagPreserve != 0, m.Flags&flagResume != 0}
}

// list answers a list request. It looks at the objects only when it sends their entries: a client does not wait for long
// until the first answer.
func (s *service) list(ctx context.Context, m *message) error {
	var out []Entry
	if m.Flags&flagStat != 0 {
		e, err := s.store.Stat(m.Name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err == nil { // no entry: the object does not exist, which may be fine
			out = []Entry{e}
		}
	} else {
		if m.After == "" || m.Name != s.folder {
			names, err := s.store.List(m.Name)
			if err != nil {
				return err
			}
			s.folder, s.names = m.Name, names
		}
		i, there := slices.BinarySearch(s.names, m.After)
		if there {
			i++
		}
		for _, n := range s.names[i:min(i+maxEntries, len(s.names))] {
			out = append(out, s.store.entry(m.Name, n))
		}
	}
	for _, e := range out {
		typ := typeFile
		switch {
		case e.Folder:
			typ = typeFolder
		case e.Other:
			typ = typeOther
		}
		if err := send(ctx, s.conn, &message{Kind: kindEntry, Type: typ, Mode: e.Mode, Mtime: e.Mtime, Size: uint64(e.Size), Name: e.Name}); err != nil {
			return err
		}
	}
	return send(ctx, s.conn, &message{Kind: kindOK})
}

// open returns the answer to request m for a file of size bytes, of which the receiver already has
// offset bytes.
func (w *window) open(m *message, size, offset int64, a Attrs) *message {
	return &message{
		Kind: kindOpen, Size: uint64(size), Addr: w.Remote.Addr, RKey: w.Remote.RKey,
		Chunk: uint32(w.Chunk), Slots: uint16(w.Slots),
		Hash: m.Hash, Mode: a.Mode, Mtime: a.Mtime, Offset: uint64(offset),
	}
}

// transfer returns the server's side of the transfer that open announces.
func (s *service) transfer(name string, open *message) *transfer {
	t := open.transfer(s.conn, s.idle, name)
	t.buf = s.window.Bytes
	return t
}

// transfer returns the transfer that the open message m announces, without its buffer.
func (m *message) transfer(c conn, idle time.Duration, name string) *transfer {
	return &transfer{
		name: name, conn: c, idle: idle, hash: m.Hash, sum: m.Hash.new(),
		offset: int64(m.Offset), size: int64(m.Size), chunk: int(m.Chunk), slots: int(m.Slots),
		own: make([]byte, min(stride, m.Size)),
	}
}

func (s *service) get(ctx context.Context, m *message) (Result, error) {
	f, info, err := s.store.Open(m.Name)
	if err != nil {
		return Result{}, err
	}
	defer f.Close()
	offset := int64(min(m.Offset, uint64(info.Size())))
	open := s.window.open(m, info.Size(), offset, AttrsOf(info))
	if err := send(ctx, s.conn, open); err != nil {
		return Result{}, err
	}
	return s.transfer(m.Name, open).send(ctx, f)
}

func (s *service) put(ctx context.Context, m *message) (Result, error) {
	in, err := s.store.Create(m.Name, int64(m.Size), m.options())
	if err != nil {
		return Result{}, err
	}
	open := s.window.open(m, int64(m.Size), in.size, in.attrs)
	if err := send(ctx, s.conn, open); err != nil {
		in.Abort()
		return Result{}, err
	}
	return s.transfer(m.Name, open).take(ctx, in)
}

// take receives a file into in, commits it and sends done.
func (t *transfer) take(ctx context.Context, in *incoming) (Result, error) {
	res, err := t.receive(ctx, in, in.prefix())
	if err != nil {
		if e, ok := errors.AsType[*Error](err); ok && e.Code == CodeChecksum {
			in.keep = false
		}
		in.Abort()
		return res, err
	}
	stop := t.disk.start()
	err = in.Commit()
	stop()
	if err != nil {
		return res, err
	}
	res.Times.Disk = t.disk.time()
	// The file is complete even if this message is lost.
	return res, send(ctx, t.conn, &message{Kind: kindDone, DiskTime: uint64(res.Times.Disk), HashTime: uint64(res.Times.Hash)})
}

// Client copies files over an established connection.
type Client struct {
	Conn     conn
	Alloc    func(n int) ([]byte, error) // registered memory for local use
	Idle     time.Duration               // 0: defaultIdle
	Progress func(done, total int64)     // nil: none

	Version  uint8 // of the server; 0: Version
	Hash     Hash  // 0: XXH128, or BLAKE3 if the server does not have that
	Preserve bool  // copy permissions and modification time
	Resume   bool  // resume an earlier copy, and keep an incomplete file on failure

	buf   []byte
	close func() error
}

// request returns a get or put of the file name, which has the attributes a.
func (c *Client) request(k kind, name string, a Attrs) *message {
	m := &message{Kind: k, Name: name, Hash: cmp.Or(c.Hash, XXH128), Mode: a.Mode, Mtime: a.Mtime}
	if m.Hash == XXH128 && c.Version == 2 {
		m.Hash = BLAKE3
	}
	if c.Preserve {
		m.Flags |= flagPreserve
	}
	if c.Resume {
		m.Flags |= flagResume
	}
	return m
}

// Put copies size bytes from r, a file with the attributes a, to the server's file name by RDMA Write.
func (c *Client) Put(ctx context.Context, r io.Reader, size int64, a Attrs, name string) (res Result, err error) {
	defer func() { c.finish(ctx, err) }()
	if err := CheckName(name); err != nil {
		return Result{}, err
	}
	request := c.request(kindPut, name, a)
	request.Size = uint64(size)
	m, err := c.ask(ctx, request)
	if err != nil {
		return Result{}, err
	}
	if m.Size != uint64(size) || m.Offset > 0 && !c.Resume {
		return Result{}, errTurn(m)
	}
	t, err := c.transfer(name, m)
	if err != nil {
		return Result{}, err
	}
	t.write = func(ctx context.Context, off, n int) error {
		return c.Conn.PostWrite(ctx, m.remote(off, n), t.buf[off:off+n])
	}
	return t.send(ctx, r)
}

// Get copies the server's file name by RDMA Read to the file as in store.
func (c *Client) Get(ctx context.Context, name string, store *Store, as string) (res Result, err error) {
	defer func() { c.finish(ctx, err) }()
	if err := CheckName(name); err != nil {
		return Result{}, err
	}
	request := c.request(kindGet, name, Attrs{})
	var in *incoming
	defer func() {
		if in != nil && err != nil {
			in.Abort()
		}
	}()
	var there Entry
	if c.Resume { // the length of the existing part must be known before data arrives
		if there, err = c.Stat(ctx, name); err != nil {
			return Result{}, err
		}
		if in, err = store.Create(as, there.Size, Options{there.Attrs, c.Preserve, true}); err != nil {
			return Result{}, err
		}
		request.Offset = uint64(in.size)
	}
	m, err := c.ask(ctx, request)
	if err != nil {
		return Result{}, err
	}
	if m.Offset != request.Offset && in == nil {
		return Result{}, &Error{CodeRequest, errMessage}
	}
	if in == nil {
		in, err = store.Create(as, int64(m.Size), Options{Attrs{m.Mode, m.Mtime}, c.Preserve, false})
	} else if m.Offset != request.Offset || int64(m.Size) != there.Size || m.Mtime != there.Mtime {
		err = &Error{CodeIO, fmt.Errorf("%s: changed on the other side while it was copied: copy again", name)}
	}
	if err != nil {
		return Result{}, err
	}
	t, err := c.transfer(name, m)
	if err != nil {
		return Result{}, err
	}
	t.read = func(ctx context.Context, off, n int) error {
		return c.Conn.Read(ctx, m.remote(off, n), t.buf[off:off+n])
	}
	take := in
	in = nil // take has closed it
	return t.take(ctx, take)
}

// list sends a list request and returns the entries of the answer.
func (c *Client) list(ctx context.Context, flags uint8, name, after string) (l []Entry, err error) {
	if err := send(ctx, c.Conn, &message{Kind: kindList, Flags: flags, Name: name, After: after}); err != nil {
		return nil, err
	}
	for {
		m, err := recv(ctx, c.Conn, c.idle())
		switch {
		case err != nil:
			return nil, err
		case m.Kind == kindOK:
			return l, nil
		case m.Kind != kindEntry || len(l) == maxEntries:
			return nil, errTurn(&m)
		}
		e := Entry{Attrs{m.Mode, m.Mtime}, m.Name, int64(m.Size), m.Type == typeFolder, m.Type == typeOther}
		if flags&flagStat == 0 { // an entry must not lead out of the folder, and the list must end
			if strings.Contains(m.Name, "/") || m.Name <= after {
				return nil, &Error{CodeRequest, errMessage}
			}
			if err := CheckName(m.Name); err != nil {
				return nil, err
			}
			if CheckName(path.Join(name, m.Name)) != nil { // as the server's own entries: folders in folders end too
				e = Entry{Name: m.Name, Other: true}
			}
			after = m.Name
		}
		l = append(l, e)
	}
}

// Stat describes the server's object name; "" is the folder that it serves. It returns
// fs.ErrNotExist if there is none.
func (c *Client) Stat(ctx context.Context, name string) (e Entry, err error) {
	defer func() {
		if !errors.Is(err, fs.ErrNotExist) {
			c.finish(ctx, err)
		}
	}()
	l, err := c.list(ctx, flagStat, name, "")
	switch {
	case err != nil:
		return Entry{}, err
	case len(l) == 0:
		return Entry{}, fileError(name, fs.ErrNotExist)
	case len(l) > 1 || l[0].Size < 0:
		return Entry{}, &Error{CodeRequest, errMessage}
	}
	return l[0], nil
}

// List calls each for the entries of the server's folder name, sorted by name.
func (c *Client) List(ctx context.Context, name string, each func(Entry) error) (err error) {
	for after := ""; ; {
		l, err := c.list(ctx, 0, name, after)
		if err != nil {
			c.finish(ctx, err)
			return err
		}
		for _, e := range l {
			if err := each(e); err != nil {
				return err
			}
			after = e.Name
		}
		if len(l) < maxEntries {
			return nil
		}
	}
}

// Mkdir creates the server's folder name if it does not exist, and sets the attributes that o preserves.
func (c *Client) Mkdir(ctx context.Context, name string, o Options) (err error) {
	defer func() { c.finish(ctx, err) }()
	if err := CheckName(name); err != nil {
		return err
	}
	m := message{Kind: kindMkdir, Mode: o.Mode, Mtime: o.Mtime, Name: name}
	if o.Preserve {
		m.Flags = flagPreserve
	}
	if err := send(ctx, c.Conn, &m); err != nil {
		return err
	}
	answer, err := recv(ctx, c.Conn, c.idle())
	if err == nil && answer.Kind != kindOK {
		err = errTurn(&answer)
	}
	return err
}

func (c *Client) finish(ctx context.Context, err error) {
	if err != nil {
		fail(ctx, c.Conn, err)
	}
}

func (c *Client) idle() time.Duration {
	if c.Idle == 0 {
		return defaultIdle
	}
	return c.Idle
}

// ask sends a request and waits for the server's window.
func (c *Client) ask(ctx context.Context, request *message) (*message, error) {
	if err := send(ctx, c.Conn, request); err != nil {
		return nil, err
	}
	m, err := recv(ctx, c.Conn, c.idle())
	if err != nil {
		return nil, err
	}
	if m.Kind != kindOpen || m.Hash != request.Hash || m.Offset > m.Size {
		return nil, errTurn(&m)
	}
	if m.Chunk == 0 || m.Chunk > maxChunk || m.Slots == 0 || m.Slots > maxSlots || uint64(m.Chunk)*uint64(m.Slots) > maxWindow {
		return nil, &Error{CodeRequest, fmt.Errorf("the server offers a window of %d times %d bytes: not allowed", m.Slots, m.Chunk)}
	}
	return &m, nil
}

func (c *Client) transfer(name string, open *message) (*transfer, error) {
	t := open.transfer(c.Conn, c.idle(), name)
	if need := t.chunk * t.slots; len(c.buf) < need {
		buf, err := c.Alloc(need)
		if err != nil {
			return nil, &Error{CodeInternal, fmt.Errorf("window of %d bytes: %w", need, err)}
		}
		c.buf = buf
	}
	t.buf = c.buf
	if c.Progress != nil {
		t.progress = func(done int64) { c.Progress(done, t.size) }
	}
	return t, nil
}

// remote returns the bytes [off,off+n) of the window.
func (m *message) remote(off, n int) iwarp.Remote {
	return iwarp.Remote{Addr: m.Addr + uint64(off), RKey: m.RKey, Len: uint32(n)}
}
