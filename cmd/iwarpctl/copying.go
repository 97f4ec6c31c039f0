package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/app/filecopy"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// copyResult is the JSON form of a file's outcome.
type copyResult struct {
	Op         string             `json:"op"`
	Verb       string             `json:"verb"`
	Name       string             `json:"name"`
	Peer       string             `json:"peer"`
	Size       int64              `json:"size"`
	Resumed    int64              `json:"resumed_at,omitempty"`
	Seconds    float64            `json:"seconds"`
	GbitPerSec float64            `json:"gbit_per_s"`
	Checksum   string             `json:"checksum"`
	SHA256     string             `json:"sha256,omitempty"`
	Busy       map[string]float64 `json:"busy_s"`
}

// copying is a cp in progress.
type copying struct {
	*copyJob
	c       *command
	addr    string
	dial    func(ctx context.Context) (*filecopy.Client, error)
	client  *filecopy.Client
	began   time.Time
	files   int   // that were copied
	size    int64 // of what was copied of them
	results jsonList
	skipped []string // names of what cannot be copied
	missed  int      // files and folders that could not be copied

	// folders holds the paths of the folders in the sources, from before the first one was made
	// at the target. Others are not copied: if the target is inside a source, the copy would go
	// on inside itself.
	folders map[string]bool

	room int // for the names that a server still may list
}

// namesRoom bounds the memory for the names in a remote source, since a server can make them up without end. Each takes
// nameCost bytes and those of its path.
const (
	namesRoom = 1 << 30
	nameCost  = 128
)

func (c *command) runCopy(ctx context.Context, j *copyJob) error {
	addr, err := resolve(ctx, j.host, j.flags.port)
	if err != nil {
		return err
	}
	// Report local errors before connecting.
	if j.put {
		for _, s := range j.sources {
			if err := j.checkSource(s); err != nil {
				return err
			}
		}
	} else if err := j.checkTarget(); err != nil {
		return err
	}
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	w := &copying{copyJob: j, c: c, addr: addr, folders: make(map[string]bool), results: jsonList{w: c.out}}
	if j.put && j.flags.recursive {
		for _, s := range j.sources {
			if err := w.findFolders(ctx, s); err != nil {
				return err
			}
		}
	}
	w.began = time.Now()
	w.dial = func(ctx context.Context) (*filecopy.Client, error) {
		return filecopy.Dial(ctx, dev, addr, c.over(filecopy.Config()))
	}
	if err := w.connect(ctx); err != nil {
		return err
	}
	defer func() { w.client.Close() }()
	if j.put {
		err = w.putAll(ctx)
	} else {
		err = w.getAll(ctx)
	}
	if err == nil || w.files > 0 {
		if err := w.done(); err != nil {
			return err
		}
	}
	switch {
	case err != nil:
		return w.failed(err)
	case w.missed > 0:
		return fileError{fmt.Errorf("cp: could not copy %d of the files and folders, which are named above", w.missed)}
	case len(w.skipped) > 0:
		return fileError{fmt.Errorf("cp: skipped what is neither a file nor a folder, has a name that is not allowed, or is a folder made during the copy: %s", strings.Join(w.skipped, ", "))}
	}
	return nil
}

// connect connects to the server.
func (w *copying) connect(ctx context.Context) error {
	client, err := w.dial(ctx)
	if err != nil {
		return peerFailed("cp", w.addr, err)
	}
	client.Hash, client.Preserve, client.Resume = w.hash, w.flags.preserve, w.flags.resume
	w.client = client
	return nil
}

// miss reports err, if it concerns one of several files and folders, and returns nil, so that the
// others are copied. It returns other errors.
func (w *copying) miss(ctx context.Context, err error) error {
	if err == nil || !w.continues(ctx, err) {
		return err
	}
	w.c.report(w.failed(err), exitFile)
	w.missed++
	return w.again(ctx, err)
}

// continues reports whether files and folders other than that of err can be copied. On a full disk
// none has room.
func (w *copying) continues(ctx context.Context, err error) bool {
	var local *filecopy.Error
	var remote *filecopy.RemoteError
	switch {
	case w.single(), exitCode(ctx, err) != exitFile:
		return false
	case errors.As(err, &local):
		return local.Code != filecopy.CodeNoSpace
	case errors.As(err, &remote):
		return remote.Code != filecopy.CodeNoSpace
	}
	return true
}

// again connects again if err, of either side of the copy protocol, has ended the connection.
func (w *copying) again(ctx context.Context, err error) error {
	if !errors.As(err, new(*filecopy.Error)) && !errors.As(err, new(*filecopy.RemoteError)) {
		return nil
	}
	w.client.Close()
	// The server may still count the previous connection as one of its clients.
	for range 50 {
		if err = w.connect(ctx); !errors.Is(err, iwarp.ErrRejected) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	return err
}

// putAll copies the sources to the server.
func (w *copying) putAll(ctx context.Context) error {
	into := w.target == "" || strings.HasSuffix(w.target, "/")
	target := strings.TrimSuffix(w.target, "/")
	if !into {
		e, err := w.client.Stat(ctx, target)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		into = err == nil && e.Folder
	}
	if !into && len(w.sources) > 1 {
		return fileError{fmt.Errorf("%s is not a folder there, and there are %d sources: end the target with a slash, and make the folder first", target, len(w.sources))}
	}
	for _, s := range w.sources {
		name := target
		if into {
			base, err := localName(s)
			if err != nil {
				return err
			}
			name = path.Join(target, base)
		}
		if err := w.miss(ctx, w.put(ctx, s, name)); err != nil {
			return err
		}
	}
	return nil
}

// findFolders finds the folders in the local folder src. What cannot be read is an error of put. It runs before the
// connection is made, since a server does not wait for long until the first request.
func (w *copying) findFolders(ctx context.Context, src string) error {
	return filepath.WalkDir(src+"/", func(name string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			w.folders[name] = true
		}
		return ctx.Err()
	})
}

// put copies the local file or folder src to name.
func (w *copying) put(ctx context.Context, src, name string) error {
	f, info, err := openSource(src)
	if err == nil {
		defer f.Close()
		began := time.Now()
		bar := w.c.newBar(path.Base(name))
		w.client.Progress = bar.update
		r, err := w.client.Put(ctx, f, info.Size(), filecopy.AttrsOf(info), name)
		bar.clear()
		if err == nil {
			w.copied("put", "RDMA Write", name, began, r)
		}
		return err
	}
	dir, serr := os.Stat(src)
	if serr != nil || !dir.IsDir() || !w.flags.recursive {
		if serr == nil && !dir.Mode().IsRegular() {
			w.skipped = append(w.skipped, src)
			return nil
		}
		return err
	}
	entries, err := os.ReadDir(src)
	if err != nil {
		return err
	}
	o := filecopy.Options{Attrs: filecopy.AttrsOf(dir), Preserve: w.flags.preserve}
	first := o
	first.Mode |= 0o700 // so that its entries can be made
	err = w.client.Mkdir(ctx, name, first)
	if denied, ok := errors.AsType[*filecopy.RemoteError](err); ok && denied.Code == filecopy.CodePermission { // the folder of another user may still take them
		if err := w.again(ctx, err); err != nil {
			return err
		}
		err = w.client.Mkdir(ctx, name, filecopy.Options{Attrs: first.Attrs})
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		full := filepath.Join(src, e.Name())
		if filecopy.CheckName(path.Join(name, e.Name())) != nil {
			w.skipped = append(w.skipped, strconv.Quote(full))
			continue
		}
		if t := e.Type(); t&fs.ModeSymlink != 0 {
			if info, err := os.Stat(full); err != nil || info.IsDir() { // a link to a folder could cause a loop
				w.skipped = append(w.skipped, full)
				continue
			}
		}
		if e.IsDir() && !w.folders[full] {
			w.skipped = append(w.skipped, full)
			continue
		}
		if err := w.miss(ctx, w.put(ctx, full, path.Join(name, e.Name()))); err != nil {
			return err
		}
	}
	if w.flags.preserve { // only now: it may be read-only, and writing the entries changed its time
		return w.client.Mkdir(ctx, name, o)
	}
	return nil
}

// getAll copies the sources to this host.
func (w *copying) getAll(ctx context.Context) error {
	dir, as := filepath.Dir(w.target), filepath.Base(w.target)
	if info, err := os.Stat(w.target); err == nil && info.IsDir() {
		dir, as = w.target, ""
	}
	store, err := filecopy.OpenStore(dir)
	if err != nil {
		return err
	}
	defer store.Close()
	for _, s := range w.sources {
		name := as
		if name == "" && s != "" {
			name = path.Base(s)
		}
		if err := w.miss(ctx, w.getSource(ctx, store, s, name)); err != nil {
			return err
		}
	}
	return nil
}

// getSource copies the source src to name in store.
func (w *copying) getSource(ctx context.Context, store *filecopy.Store, src, name string) error {
	if !w.flags.recursive {
		return w.getFile(ctx, store, src, name)
	}
	e, err := w.client.Stat(ctx, src)
	if err != nil {
		return err
	}
	w.room = namesRoom
	if err := w.listFolders(ctx, src, e); err != nil {
		return err
	}
	w.room = namesRoom // they are listed again
	return w.get(ctx, store, src, name, e)
}

// list returns the entries of the remote folder src.
func (w *copying) list(ctx context.Context, src string) (l []filecopy.Entry, err error) {
	err = w.client.List(ctx, src, func(e filecopy.Entry) error {
		if w.room -= nameCost + len(src) + len(e.Name); w.room < 0 {
			return &filecopy.Error{Code: filecopy.CodeRequest, Err: fmt.Errorf("%s: the server lists more files and folders than 1 GiB of memory can hold: copy its folders one at a time", cmp.Or(src, "the folder itself"))}
		}
		l = append(l, e)
		return nil
	})
	return l, err
}

// listFolders finds the remote folder src and the folders in it. What cannot be read is an error of
// get.
func (w *copying) listFolders(ctx context.Context, src string, e filecopy.Entry) error {
	if !e.Folder {
		return nil
	}
	w.folders[src] = true
	entries, err := w.list(ctx, src)
	if err != nil && w.continues(ctx, err) {
		return w.again(ctx, err)
	}
	for _, e := range entries {
		if err := w.listFolders(ctx, path.Join(src, e.Name), e); err != nil {
			return err
		}
	}
	return err
}

// get copies the remote file or folder src to name in store; "" is the folder of the store itself.
func (w *copying) get(ctx context.Context, store *filecopy.Store, src, name string, e filecopy.Entry) error {
	switch {
	case e.Other, e.Folder && !w.folders[src]:
		w.skipped = append(w.skipped, src)
		return nil
	case !e.Folder:
		return w.getFile(ctx, store, src, name)
	}
	o := filecopy.Options{Attrs: e.Attrs, Preserve: w.flags.preserve}
	if name != "" {
		first := filecopy.Options{Attrs: e.Attrs}
		if old, err := store.Stat(name); err == nil && old.Folder && old.Mode&0o700 != 0o700 && o.Preserve {
			first.Mode |= 0o700 // so that its entries can be made
			first.Preserve = true
		}
		err := store.Mkdir(name, first)
		if err != nil && first.Preserve { // the folder of another user, which may still take them
			first.Preserve = false
			err = store.Mkdir(name, first)
		}
		if err != nil {
			return err
		}
	}
	entries, err := w.list(ctx, src)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := w.miss(ctx, w.get(ctx, store, path.Join(src, e.Name), path.Join(name, e.Name), e)); err != nil {
			return err
		}
	}
	if o.Preserve && name != "" {
		return store.Mkdir(name, o)
	}
	return nil
}

func (w *copying) getFile(ctx context.Context, store *filecopy.Store, src, name string) error {
	began := time.Now()
	bar := w.c.newBar(path.Base(name))
	w.client.Progress = bar.update
	r, err := w.client.Get(ctx, src, store, name)
	bar.clear()
	if err == nil {
		w.copied("get", "RDMA Read", src, began, r)
	}
	return err
}

// copied reports one file.
func (w *copying) copied(op, verb, name string, began time.Time, r filecopy.Result) {
	res := copyResult{
		Op: op, Verb: verb, Name: name, Peer: w.addr, Size: r.Size, Resumed: r.Offset, Seconds: time.Since(began).Seconds(), Checksum: r.Hash.Text(r.Sum),
		Busy: map[string]float64{"disk": r.Times.Disk.Seconds(), "checksum": r.Times.Hash.Seconds(), "network": r.Times.Network.Seconds(), "peer_disk": r.Times.PeerDisk.Seconds(), "peer_checksum": r.Times.PeerHash.Seconds()},
	}
	if r.Hash == filecopy.SHA256 {
		res.SHA256 = hex.EncodeToString(r.Sum[:])
	}
	res.GbitPerSec = gbit(res.Size-res.Resumed, res.Seconds)
	w.files++
	w.size += r.Size - r.Offset
	switch { // the command ends if its output cannot be written
	case w.c.json && w.single():
		_ = w.c.print(res)
		return
	case w.c.json:
		_ = w.results.add(res)
		return
	}
	resumed := ""
	if r.Offset > 0 {
		resumed = fmt.Sprintf(", resumed at %d", r.Offset)
	}
	fmt.Fprintf(w.c.out, "%s %s: %s by %s in %.2f s%s, %s, %s\n", res.Op, printable.String(res.Name), printable.Count(res.Size, "byte"), res.Verb, res.Seconds, resumed, rate(res.Size-res.Resumed, res.Seconds), res.Checksum)
	fmt.Fprintf(w.c.out, "  busy here: disk %.2f s, checksum %.2f s; there: disk %.2f s, checksum %.2f s; network %.2f s\n",
		res.Busy["disk"], res.Busy["checksum"], res.Busy["peer_disk"], res.Busy["peer_checksum"], res.Busy["network"])
}

// done reports the totals.
func (w *copying) done() error {
	switch {
	case w.c.json && w.single() && w.files == 1: // it is printed
	case w.c.json:
		return w.results.end()
	case w.files != 1:
		took := time.Since(w.began).Seconds()
		fmt.Fprintf(w.c.out, "%s, %s in %.2f s, %s\n", printable.Count(w.files, "file"), printable.Count(w.size, "byte"), took, rate(w.size, took))
	}
	return nil
}

// failed marks err as a connection error, unless it concerns a file or was reported by the other
// side.
func (w *copying) failed(err error) error {
	var local *filecopy.Error
	var remote *filecopy.RemoteError
	var path *fs.PathError
	var file fileError
	switch {
	case errors.As(err, &local), errors.As(err, &path), errors.As(err, &file):
		return fmt.Errorf("cp: %w", err)
	case errors.As(err, &remote):
		return fmt.Errorf("cp: %s: %w", w.addr, err)
	}
	if w.flags.resume {
		return peerFailed("cp", w.addr, fmt.Errorf("%w; run the same command again to continue", err))
	}
	return peerFailed("cp", w.addr, err)
}
