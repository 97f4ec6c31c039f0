// Package isolation tests that clients cannot harm each other or the daemon: two programs of different users, one of
// them hostile; programs that are killed; and very many queue pairs and clients at once.
package isolation

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// full reports whether the tests run at their full size instead of the short one of every test run.
func full() bool { return os.Getenv("ISOLATION") == "full" }

// roleEnv makes the test program act as a client.
const roleEnv = "ISOLATION_ROLE"

// job holds the parameters of a client process.
type job struct {
	Socket string
	Peer   string          // sink of the other node
	Strike string          // service of the other node that attacks its clients
	Over   iwarp.Transport // for Peer
	Victim victimObjects
	Seed   uint64
}

// victimObjects holds the handles of the victim's objects, so that the attacker's guesses are right.
type victimObjects struct {
	QP, RKey uint32
	Addr     uint64
	Port     uint16
	Handles  []uint32
	Client   uint32
}

func TestMain(m *testing.M) {
	role := os.Getenv(roleEnv)
	if role == "" {
		os.Exit(testenv.RunApart(m, embed.PairAddrs()...))
	}
	var j job
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &j)
	}
	if err == nil {
		err = map[string]func(*job, *bufio.Reader) error{"victim": victim, "attacker": attacker, "worker": worker, "steady": steady}[role](&j, in)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role+":", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// world is two nodes; the clients connect to b through its socket.
type world struct {
	a, b   *embed.Node
	dir    string
	exe    string // the test program, in a place where other users can run it
	socket string
	peer   string
	strike string

	socketPeer string // peer over kernel sockets, with testenv.Both
}

// peerOver returns the sink of the other node.
func (w *world) peerOver(t iwarp.Transport) string {
	if t == iwarp.Socket {
		return w.socketPeer
	}
	return w.peer
}

func newWorld(t *testing.T, limits ctrl.Limits) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "iwarpd-isolation")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	testenv.Chmod(t, dir, 0o755)
	w := &world{dir: dir, exe: filepath.Join(dir, "test"), socket: filepath.Join(dir, "iwarpd.sock")}
	testenv.WriteFile(t, w.exe, testenv.ReadFile(t, "/proc/self/exe"), 0o755)
	cfg := ctrl.Config{Socket: w.socket, Mode: 0o666, Limits: limits, Slots: ctrl.Slots{Folder: filepath.Join(dir, "slots"), Count: 2}}
	if testenv.Sockets() || testenv.Both() {
		cfg.TimeWait = time.Second // until then a port has a descriptor, and the tests compare their number
	}
	w.a, w.b, err = embed.Pair(embed.PairConfig{Sockets: testenv.Sockets(), Both: testenv.Both(), CtrlB: cfg})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); w.a.Close(); w.b.Close() })
	w.peer = w.service(t, ctx, ":7001", iwarp.TCP, sink)
	w.strike = w.service(t, ctx, ":7002", iwarp.TCP, strike)
	if testenv.Both() {
		w.socketPeer = w.service(t, ctx, ":7011", iwarp.Socket, sink)
		w.service(t, ctx, ":7012", iwarp.Socket, strike)
	}
	return w
}

// service accepts connections on node a.
func (w *world) service(t *testing.T, ctx context.Context, addr string, over iwarp.Transport, serve func(context.Context, *iwarp.Conn)) string {
	t.Helper()
	l, err := w.a.Device().Listen(ctx, addr, &iwarp.Config{Startup: iwarp.Startup{Transport: over}, Backlog: 2000, SendDepth: 4, RecvDepth: 4, RecvSize: 256})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept(ctx)
			if err != nil {
				return
			}
			go func() {
				defer c.Abort()
				serve(ctx, c)
			}()
		}
	}()
	return w.a.Addr().String() + addr
}

// sink gives each connection memory to write to and sends its location.
func sink(ctx context.Context, c *iwarp.Conn) {
	m, err := c.Alloc(ctx, 1<<16, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead)
	if err != nil {
		return
	}
	if c.Send(ctx, marshal(m.Remote())) == nil {
		<-c.QP().Done()
	}
}

// strike writes to, or reads from, the memory that the connection's private data name.
func strike(ctx context.Context, c *iwarp.Conn) {
	var at struct {
		iwarp.Remote
		Read bool
	}
	if json.Unmarshal(c.Info().PrivateData, &at) != nil {
		return
	}
	b := []byte("struck by the peer")
	if at.Read {
		_ = c.Read(ctx, at.Remote, b)
	} else {
		_ = c.Write(ctx, at.Remote, b)
	}
	<-c.QP().Done()
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// process is a client process.
type process struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start runs a client as user uid.
func (w *world) start(t *testing.T, role string, uid uint32, j job) *process {
	t.Helper()
	j.Socket, j.Peer, j.Strike = w.socket, w.peerOver(j.Over), w.strike
	p := &process{Cmd: exec.Command(w.exe)}
	p.Env = append(os.Environ(), roleEnv+"="+role, "GOTRACEBACK=all")
	p.Stderr = os.Stderr
	if os.Getuid() == 0 {
		p.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	var err error
	if p.in, err = p.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.in.Close(); _ = p.Process.Kill(); _ = p.Wait() })
	if _, err := p.in.Write(append(marshal(j), '\n')); err != nil {
		t.Fatal(err)
	}
	return p
}

// ask writes a line and decodes the answer into v.
func (p *process) ask(t *testing.T, line string, v any) {
	t.Helper()
	if line != "" {
		if _, err := io.WriteString(p.in, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	b, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		t.Fatalf("%q: %q, %v", line, b, err)
	}
}

// dialSink connects to sink and receives the location of its memory.
func dialSink(ctx context.Context, d *iwarp.Device, peer string, over iwarp.Transport) (*iwarp.Conn, iwarp.Remote, error) {
	var to iwarp.Remote
	c, err := d.Dial(ctx, peer, &iwarp.Config{Startup: iwarp.Startup{Transport: over}})
	if err != nil {
		return nil, to, err
	}
	b := make([]byte, 256)
	n, err := c.Recv(ctx, b)
	if err == nil {
		err = json.Unmarshal(b[:n], &to)
	}
	return c, to, err
}

// victim creates one of every object, then writes at a steady rate, and checks after each answer that its memory and
// connection are intact.
func victim(j *job, in *bufio.Reader) error {
	ctx := context.Background()
	d, err := iwarp.Open(ctx, j.Socket)
	if err != nil {
		return err
	}
	c, to, err := dialSink(ctx, d, j.Peer, j.Over)
	if err != nil {
		return err
	}
	b := make([]byte, 4096)
	own, err := c.Alloc(ctx, 1<<16, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteAtomic)
	if err != nil {
		return err
	}
	for i := range own.Bytes() {
		own.Bytes()[i] = byte(i*7 + 3)
	}
	l, err := d.Listen(ctx, ":7100", &iwarp.Config{Streaming: true})
	if err != nil {
		return err
	}
	defer l.Close()
	if _, err := c.PD().AllocMW(ctx); err != nil {
		return err
	}
	if _, err := d.CreateSRQ(ctx, iwarp.SRQConfig{PD: c.PD()}); err != nil {
		return err
	}
	objects := victimObjects{QP: c.QP().Num(), RKey: own.RKey(), Addr: own.Base(), Port: l.Addr().Port(), Client: d.Attr().Client}
	for h := range uint32(16) { // handles start at 1
		objects.Handles = append(objects.Handles, h+1)
	}
	fmt.Println(string(marshal(objects)))
	const pace = 500 * time.Microsecond
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil
		}
		length, err := time.ParseDuration(line[:len(line)-1])
		if err != nil {
			return err
		}
		done := 0
		began := time.Now()
		for next := began; done == 0 || time.Since(began) < length; next = next.Add(pace) {
			time.Sleep(time.Until(next))
			if err := c.Write(ctx, to.At(0, 4096), b); err != nil {
				return err
			}
			done++
		}
		for i, v := range own.Bytes() {
			if v != byte(i*7+3) {
				return fmt.Errorf("byte %d of the victim's memory is %#x", i, v)
			}
		}
		fmt.Println(string(marshal(float64(done) / time.Since(began).Seconds())))
	}
}

// patience bounds each wait for something that is immediate on an idle machine.
const patience = time.Minute

// within polls until ok returns true or an error, for states of the daemon without notification.
func within(what string, ok func() (bool, error)) error {
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Microsecond) {
		if done, err := ok(); done || err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s", patience, what)
		}
	}
}

// settle waits until ok holds.
func settle(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if err := within(what, func() (bool, error) { return ok(), nil }); err != nil {
		t.Fatal(err)
	}
}
