package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/dataplane/link"
)

// The pipe is the in-process wire: it connects two engines in one process, without a kernel
// between them. The application drives the near one by its polling, and the far one spins on
// the other CPU. The time of a Write from post to completion is the cost of iwarpd alone. A
// work request that ends in package verbs (a fast registration or a local invalidate) uses the
// same rings and doorbell but no protocol: its time is the API's share.

func init() { roles["pipe"] = pipeChild }

func runPipe(m *matrix, mtu int, tests []test) ([]result, error) {
	both := m.lab.a
	both.cpu = anyCPU
	p, err := both.spawn(job{Role: "pipe", MTU: mtu, Tests: tests, Warm: m.opt.warm, Window: m.opt.window}, m.limit(len(tests)), "GOMAXPROCS=3")
	if err != nil {
		return nil, err
	}
	return p.results()
}

func pipeChild(j job, _ func()) ([]result, error) {
	near, far, err := pipePair(j.MTU)
	if err != nil {
		return nil, err
	}
	defer near.Close()
	defer far.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	addr := net.JoinHostPort(far.Addr().String(), strconv.Itoa(iwarpPort))
	ln, err := far.Device().Listen(ctx, addr, nil)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			req, err := ln.Request(ctx)
			if err != nil {
				return
			}
			_ = serveOne(ctx, far.Device(), req, false) // the client reports its errors
		}
	}()
	pin() // the far engine uses the other CPU
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		j.Remote = far.Addr().String()
		if rs[i], err = iwarpTest(ctx, near.Device(), j, t); err != nil {
			rs[i] = result{Err: err.Error()}
		}
	}
	return rs, nil
}

// pipePair opens two engines joined by the in-process wire.
func pipePair(mtu int) (near, far *embed.Node, err error) {
	a, b, err := link.NewPipe(link.PipeConfig{MTU: mtu})
	if err != nil {
		return nil, nil, err
	}
	addrs := [2]netip.Addr{netip.AddrFrom4([4]byte{10, 99, 0, 1}), netip.AddrFrom4([4]byte{10, 99, 0, 2})}
	macs := [2][6]byte{{2, 0, 0, 0, 0x99, 1}, {2, 0, 0, 0, 0x99, 2}}
	var nodes [2]*embed.Node
	for i, l := range []link.Link{a, b} {
		own := addrs[i : i+1]
		nodes[i], err = embed.Open(embed.Config{
			Link: l, Addrs: own, InlineProgress: i == 0, Poll: dataplane.Busy,
			Resolver: &hostnet.Static{SrcMAC: macs[i], DstMAC: macs[1-i], MTU: mtu, Addrs: own},
		})
		if err != nil {
			if i == 1 {
				err = errors.Join(err, nodes[0].Close())
			}
			return nil, nil, err
		}
	}
	return nodes[0], nodes[1], nil
}

// local posts work requests that end in package verbs: they register a region and invalidate it
// in turn.
func (e *end) local(j job) (result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	mr, err := e.pd.AllocFast(ctx, 4096, iwarp.AccessRemoteRead)
	if err != nil {
		return result{}, err
	}
	reg := mr.Reg(0, 0, 0, 0, 4096, iwarp.AccessRemoteRead)
	reg.Flags |= iwarp.Signaled
	inv := iwarp.SendWR{Op: iwarp.OpLocalInv, Flags: iwarp.Signaled, Inv: reg.RKey}
	wr, next := &reg, &inv
	r, err := pingPong(j, func() error {
		if err := e.qp.PostSend(wr); err != nil {
			return err
		}
		wr, next = next, wr
		_, err := e.poll()
		return err
	})
	return r, errors.Join(err, mr.Close())
}

// pin pins the calling goroutine to a thread on CPU 0 until the process ends.
func pin() {
	runtime.LockOSThread()
	var one unix.CPUSet
	one.Set(0)
	_ = unix.SchedSetaffinity(0, &one)
}
