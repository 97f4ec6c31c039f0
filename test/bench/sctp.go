package main

import (
	_ "embed" // the usrsctp program
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/client"
)

const usrsctpPort = "7193"

//go:embed usrsctp/bulk.c
var usrsctpSource []byte

// startup returns the parameters of the transport, which both ends must agree on.
func (j job) startup() iwarp.Startup {
	if j.SCTP {
		return iwarp.Startup{Transport: iwarp.SCTP}
	}
	return iwarp.Startup{}
}

// runUsrsctp measures usrsctp over raw sockets. A message fills one packet.
func runUsrsctp(m *matrix, mtu int, tests []test) ([]result, error) {
	if _, err := os.Stat("/usr/include/usrsctp.h"); err != nil {
		return nil, fmt.Errorf("%w: usrsctp is not installed (Debian: libusrsctp-dev)", errSkip)
	}
	exe, err := m.compile("usrsctp", usrsctpSource, "-lusrsctp")
	if err != nil {
		return nil, err
	}
	// usrsctp computes checksums itself and needs whole packets.
	if err := m.lab.setOffloads(false); err != nil {
		return nil, err
	}
	rs := make([]result, len(tests))
	for i, t := range tests {
		what, size := "ping", t.Size
		if t.Workload == "stream" {
			what, size = "stream", (mtu-20-12-16)&^3
		}
		if rs[i], err = m.usrsctpTest(exe, what, size); err != nil {
			rs[i].Err = err.Error()
		}
	}
	return rs, nil
}

func (m *matrix) usrsctpTest(exe, what string, size int) (r result, err error) {
	server := exec.Command(exe, "server", usrsctpPort)
	out, err := server.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := m.lab.b.start(server); err != nil {
		return r, err
	}
	defer func() { _ = stop(server) }()
	if _, err := out.Read(make([]byte, 16)); err != nil {
		return r, fmt.Errorf("usrsctp: the server does not start: %w", err)
	}
	ms := func(d time.Duration) string { return strconv.Itoa(int(d.Milliseconds())) }
	client := exec.Command(exe, "client", usrsctpPort, m.lab.b.addr.Addr().String(), what, strconv.Itoa(size), ms(m.opt.warm), ms(m.opt.window))
	said, err := m.lab.a.output(client, m.limit(1))
	if err != nil {
		return r, fmt.Errorf("usrsctp: %w", err)
	}
	f := strings.Fields(said)
	if len(f) == 0 {
		return r, fmt.Errorf("usrsctp said nothing")
	}
	if r.Value, err = strconv.ParseFloat(f[0], 64); err != nil || len(f) == 1 {
		return r, err
	}
	r.Mean, err = strconv.ParseFloat(f[1], 64)
	return r, err
}
