package verbs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// guest is the virtual machine of test/interop/guest.
type guest struct {
	in    io.WriteCloser
	lines chan string // output of the guest; closed at its end
}

// startGuest boots a guest with an address on tap0 of ns and a build of siw. The programs are copied into it.
func startGuest(t *testing.T, ns *testenv.Namespace, addr, build string, programs ...string) *guest {
	t.Helper()
	// Not in the namespace, which has no network for what the first start installs.
	cmd := exec.Command("../interop/guest", append([]string{ns.Name, "tap0", addr}, programs...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = append(os.Environ(), "SIW="+build)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	g := &guest{in: in, lines: make(chan string)}
	over := make(chan struct{})
	go func() {
		defer close(g.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case g.lines <- s.Text():
			case <-over:
			}
		}
	}()
	t.Cleanup(func() {
		close(over)
		_ = in.Close()
		_ = cmd.Wait()
	})
	if _, err := g.answer(15 * time.Minute); err != nil { // the first start builds the guest
		t.Fatalf("the guest does not start: %v", err)
	}
	return g
}

// answer returns the output of the guest up to the next "@@". It fails if the word after that
// is a status other than 0.
func (g *guest) answer(limit time.Duration) (out string, err error) {
	deadline := time.After(limit)
	var b strings.Builder
	for {
		select {
		case line, ok := <-g.lines:
			if !ok {
				return b.String(), errors.New("the guest has ended")
			}
			if word, ok := strings.CutPrefix(line, "@@ "); ok {
				if n, err := strconv.Atoi(word); err == nil && n != 0 {
					return b.String(), fmt.Errorf("exit code %d", n)
				}
				return b.String(), nil
			}
			fmt.Fprintln(&b, line)
		case <-deadline:
			return b.String(), errors.New("the guest does not answer")
		}
	}
}

// do runs a shell command in the guest.
func (g *guest) do(seconds int, line string) (out string, err error) {
	if _, err := fmt.Fprintf(g.in, "%d %s\n", seconds, line); err != nil {
		return "", err
	}
	return g.answer(time.Duration(seconds+60) * time.Second)
}

// patience is the time limit of a program in the guest, in seconds. The guest's processor is
// emulated.
const patience = 100

// serve starts the server of a row in the guest and waits until it listens.
func (g *guest) serve(command string) error {
	const listens = `grep -q ' 0A ' /proc/net/tcp /proc/net/tcp6`
	_, err := g.do(60, command+` >/tmp/server 2>&1 & S=$!; n=0; until `+listens+`; do sleep 0.1; n=$((n+1)); [ $n -lt 300 ] && kill -0 $S || { cat /tmp/server; false; break; }; done`)
	return err
}

// stop stops the server in the guest. If wait is set, the server must end by itself with status
// 0.
func (g *guest) stop(program string, wait bool) (string, error) {
	if wait {
		if out, err := g.do(patience, `wait $S || { s=$?; tail -5 /tmp/server; (exit $s); }`); err != nil {
			return out, err
		}
	}
	return g.do(30, `killall -q -9 `+program+`; wait; true`)
}

// peerToPeer is the build of siw that asks for a peer-to-peer set-up (RFC 6581).
const peerToPeer = "p2p"

// TestSoftIwarp runs rows against Linux's soft-iWARP, in both roles. It takes minutes and runs
// only with SIW=1, or with SIW=p2p for another build (test/interop/lab.sh).
func TestSoftIwarp(t *testing.T) {
	build := os.Getenv("SIW")
	switch build {
	case "":
		t.Skip("SIW is not set")
	case "1":
		build = "default"
	}
	plain.libraries(t)
	testenv.RequireRoot(t)
	end := testenv.NewVeth(t, 1500).A
	for _, args := range []string{"tuntap add tap0 mode tap", "addr add 10.97.0.1/24 dev tap0", "link set tap0 up"} {
		end.NS.IP(t, strings.Fields(args)...)
	}
	end.Name, end.Addr4 = "tap0", netip.MustParseAddr("10.97.0.1")
	const addr = "10.97.0.2"
	g := startGuest(t, end.NS, addr+"/24", build, guestPrograms()...)
	h := newHost(t, plain, &end)
	for _, r := range rows() {
		if !r.siw {
			continue
		}
		if build == peerToPeer {
			r.clientFails = "" // needs it
		}
		t.Run("server siw/"+r.group+"/"+r.name, func(t *testing.T) {
			why := unfinished
			defer func() { results.add(t, r, "server on siw", r.serverFails, why) }()
			why = judge(t, r.serverFails, againstServer(t, r, h, g, addr))
		})
		t.Run("client siw/"+r.group+"/"+r.name, func(t *testing.T) {
			why := unfinished
			defer func() { results.add(t, r, "client on siw", r.clientFails, why) }()
			why = judge(t, r.clientFails, againstClient(t, r, h, g))
		})
	}
}

// judge returns how a row differed from the expectation, and reports that to t. fails is the reason
// why it must fail, if it must, and got is why it failed.
func judge(t *testing.T, fails, got string) (why string) {
	t.Helper()
	switch {
	case fails == "":
		why = got
	case got == "":
		why = "works, though the table says that it does not: " + fails
	default:
		t.Log(got)
	}
	if why != "" {
		t.Error(why)
	}
	return why
}

// guestPrograms returns the first words of the rows.
func guestPrograms() (programs []string) {
	seen := make(map[string]bool)
	for _, r := range rows() {
		for _, c := range []string{r.server, r.client} {
			p, _, _ := strings.Cut(strings.TrimPrefix(c, polite), " ")
			if r.siw && !seen[p] {
				programs = append(programs, p)
			}
			seen[p] = true
		}
	}
	return programs
}

// inGuest returns a command of a row for the guest's shell, which must not take the semicolon of a provider's name. The guest has no
// nice, and is slow enough without.
func inGuest(command, addr string) string {
	return strings.NewReplacer("ADDR", addr, ";", `\;`).Replace(strings.TrimPrefix(command, polite))
}

// againstServer runs the client of r here and the server in the guest. It returns why they failed.
func againstServer(t *testing.T, r row, h *host, g *guest, addr string) (why string) {
	t.Helper()
	program := strings.Fields(r.server)[0]
	defer h.endAll(t)
	for try := 0; ; try++ {
		if err := g.serve(inGuest(r.server, addr)); err != nil {
			why = fmt.Sprintf("the server: %v", err)
			break
		}
		client := h.start(t, "timeout "+strconv.Itoa(patience)+" "+strings.ReplaceAll(r.client, "ADDR", addr))
		if code := client.Wait(2 * patience * time.Second); code != 0 {
			why = fmt.Sprintf("the client: exit code %d\n%s", code, client)
		}
		out, err := g.stop(program, why == "" && !r.stays)
		if why == "" && err != nil {
			why = fmt.Sprintf("the server: %v\n%s", err, out)
		}
		if why == "" || try == 10 || !refusedBetween(r, why) {
			break
		}
		why = ""
	}
	return why
}

// againstClient runs the server of r here and the client in the guest. It returns why they failed.
func againstClient(t *testing.T, r row, h *host, g *guest) (why string) {
	t.Helper()
	defer h.endAll(t)
	limit := patience
	if r.clientFails == sendsFirst {
		limit /= 4 // it waits forever
	}
	for try := 0; ; try++ {
		server := serve(t, r, h)
		out, err := g.do(limit, "timeout "+strconv.Itoa(limit-10)+" "+inGuest(r.client, h.end.Addr4.String()))
		if err != nil {
			why = fmt.Sprintf("the client: %v\n%s", err, out)
		} else if !r.stays {
			if code := server.Wait(time.Minute); code != 0 {
				why = fmt.Sprintf("the server: exit code %d\n%s", code, server)
			}
		}
		h.endAll(t)
		if why == "" || try == 10 || !refusedBetween(r, why) {
			break
		}
		why = ""
	}
	return why
}
