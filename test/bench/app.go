package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// iwarpServer accepts connections one after another. The first byte of the request's private
// data selects whether the server answers messages ('s'), answers Writes ('w') or sleeps.
func iwarpServer(j job, ready func()) ([]result, error) {
	ctx, cancel := whileStdinOpen()
	defer cancel()
	d, closer, err := open(ctx, j)
	if err != nil {
		return nil, err
	}
	defer closer()
	ln, err := d.Listen(ctx, net.JoinHostPort(j.Local, strconv.Itoa(iwarpPort)), &iwarp.Config{Startup: j.startup()})
	if err != nil {
		return nil, err
	}
	ready()
	var rs []result
	for {
		req, err := ln.Request(ctx)
		if ctx.Err() != nil {
			return rs, nil
		}
		if err != nil {
			return nil, err
		}
		before := counters(ctx, d)
		if err := serveOne(ctx, d, req, j.Socket != ""); err != nil && ctx.Err() == nil {
			return nil, err
		}
		rs = append(rs, result{Server: changes(before, counters(ctx, d))})
	}
}

func serveOne(ctx context.Context, d *iwarp.Device, req *iwarp.ConnRequest, shared bool) error {
	e, err := newEnd(ctx, d, shared)
	if err != nil {
		return errors.Join(err, req.Reject(ctx, nil))
	}
	echo := len(req.PrivateData()) >= 5 && req.PrivateData()[0] == 's'
	size := 0
	if echo {
		size = int(binary.BigEndian.Uint32(req.PrivateData()[1:]))
		for range 16 {
			if err := e.postRecv(size); err != nil {
				return err
			}
		}
	}
	if _, err := req.Accept(ctx, e.qp, &iwarp.Config{PrivateData: offer{e.mr.Base(), e.mr.RKey()}.encode()}); err != nil {
		return err
	}
	if echo {
		err = e.echo(size)
	} else if p := req.PrivateData(); len(p) > 5 && p[0] == 'w' {
		err = e.writeBack(int(binary.BigEndian.Uint32(p[1:])), p[5:])
	}
	if err != nil {
		return err
	}
	select {
	case <-e.qp.Done():
	case <-ctx.Done():
	}
	return e.close()
}

// echo answers each message with a message until the connection ends. The client reports why it
// ended.
func (e *end) echo(size int) error {
	for n := 0; ; {
		wcs, err := e.poll()
		if err != nil {
			return nil
		}
		for i := range wcs {
			if !wcs[i].IsRecv() {
				continue
			}
			if err := e.send(size, &n); err != nil {
				return err
			}
			if err := e.postRecv(size); err != nil {
				return err
			}
		}
	}
}

// writeBack answers each Write with a Write until the connection ends.
func (e *end) writeBack(size int, private []byte) error {
	to, err := decodeOffer(private)
	if err != nil {
		return err
	}
	for n := uint32(1); ; n++ {
		if e.written(n, size) != nil {
			return nil
		}
		if err := e.write(n, size, to); err != nil {
			return err
		}
	}
}

func iwarpClient(j job, _ func()) ([]result, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	d, closer, err := open(ctx, j)
	if err != nil {
		return nil, err
	}
	defer closer()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		if rs[i], err = iwarpTest(ctx, d, j, t); err != nil {
			rs[i] = result{Err: err.Error()}
		}
	}
	return rs, nil
}

func iwarpTest(ctx context.Context, d *iwarp.Device, j job, t test) (r result, err error) {
	e, err := newEnd(ctx, d, j.Socket != "" && !j.Alone)
	if err != nil {
		return r, err
	}
	private := binary.BigEndian.AppendUint32([]byte{'o'}, uint32(t.Size))
	switch t.Workload {
	case "write-ping-pong":
		private[0] = 'w'
		private = append(private, offer{e.mr.Base(), e.mr.RKey()}.encode()...)
	case "send-lat", "send-ping-pong":
		private[0] = 's'
		for range 16 {
			if err := e.postRecv(t.Size); err != nil {
				return r, err
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, j.Warm+j.Window+10*time.Second)
	defer cancel()
	info, err := e.qp.Connect(ctx, net.JoinHostPort(j.Remote, strconv.Itoa(iwarpPort)), &iwarp.Config{PrivateData: private, Startup: j.startup()})
	if err != nil {
		return r, err
	}
	to, err := decodeOffer(info.PrivateData)
	if err == nil {
		before := counters(ctx, d)
		r, err = e.measure(j, t, to)
		r.Client = changes(before, counters(ctx, d))
	}
	err = errors.Join(err, e.qp.Disconnect(ctx))
	select { // Close would drop what Disconnect still has to send
	case <-e.qp.Done():
	case <-ctx.Done():
	}
	return r, errors.Join(err, e.close())
}

// counters returns the counters of the engine, or nil if they cannot be read. The session may be over.
func counters(ctx context.Context, d *iwarp.Device) map[string]uint64 {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	all, err := d.Admin().Stats(ctx)
	if err != nil {
		return nil
	}
	c := make(map[string]uint64, len(all))
	for _, k := range all {
		c[k.GetName()] = k.GetValue()
	}
	return c
}

// changes returns how much each counter has grown. Gauges that shrank are left out.
func changes(before, after map[string]uint64) map[string]uint64 {
	c := make(map[string]uint64)
	for k, v := range after {
		if v > before[k] {
			c[k] = v - before[k]
		}
	}
	return c
}

// health returns a warning if either end lost more than one frame in a thousand, or sent as many
// segments again, and "" otherwise.
func health(r *result) string {
	var notes []string
	if r.Note != "" {
		notes = append(notes, r.Note)
	}
	for _, end := range []struct {
		name    string
		counted map[string]uint64
	}{{"client", r.Client}, {"server", r.Server}} {
		c := end.counted
		of := c["engine.rx_frames"]
		if n := c["link.rx_fill_empty"] + c["link.rx_ring_full"] + c["link.rx_dropped"]; n*1000 > of {
			notes = append(notes, fmt.Sprintf("the %s lost %d of %d frames at its receiving ring", end.name, n, of+n))
		}
		of = c["engine.tx_frames"] - c["engine.tx_super"] + c["engine.tx_super_segments"]
		if n := c["engine.tx_retransmits"]; n*1000 > of {
			notes = append(notes, fmt.Sprintf("%d of the %s's %d segments were retransmissions", n, end.name, of))
		}
	}
	return strings.Join(notes, "; ")
}

func (e *end) measure(j job, t test, to offer) (result, error) {
	switch t.Workload {
	case "write-bw":
		return e.stream(j, t, iwarp.OpWrite, to, max(4, min(64, 4*mib/t.Size)), 1)
	case "read-bw":
		return e.stream(j, t, iwarp.OpRead, to, max(4, min(16, 4*mib/t.Size)), 1)
	case "write-spread":
		e.spread = true
		return e.stream(j, t, iwarp.OpWrite, to, spreadDepth, 1)
	case "read-spread":
		e.spread = true
		return e.stream(j, t, iwarp.OpRead, to, spreadDepth, 1)
	case "write-rate":
		return e.stream(j, t, iwarp.OpWrite, to, writeDepth, signalEach)
	case "read-lat":
		return e.oneByOne(j, t, iwarp.OpRead, to, iwarp.Signaled)
	case "write-lat":
		return e.oneByOne(j, t, iwarp.OpWrite, to, iwarp.Signaled|iwarp.Inline)
	case "write-ping-pong":
		n := uint32(0)
		r, err := pingPong(j, func() error {
			n++
			if err := e.write(n, t.Size, to); err != nil {
				return err
			}
			return e.written(n, t.Size)
		})
		return half(r), err
	case "local":
		return e.local(j)
	case "send-lat":
		return e.exchange(j, t)
	case "send-ping-pong":
		r, err := e.exchange(j, t)
		return half(r), err
	}
	return result{}, fmt.Errorf("no workload %q", t.Workload)
}

// exchange sends messages to a server that answers each with a message.
func (e *end) exchange(j job, t test) (result, error) {
	n := 0
	return pingPong(j, func() error {
		if err := e.send(t.Size, &n); err != nil {
			return err
		}
		for {
			wcs, err := e.poll()
			if err != nil {
				return err
			}
			for i := range wcs {
				if wcs[i].IsRecv() {
					return e.postRecv(t.Size)
				}
			}
		}
	})
}

// half returns half of the round trip r.
func half(r result) result {
	return result{Value: r.Value / 2, Mean: r.Mean / 2, P99: r.P99 / 2, P999: r.P999 / 2}
}

// oneByOne posts each operation after the previous one has completed.
func (e *end) oneByOne(j job, t test, op iwarp.Op, to offer, flags iwarp.SendFlags) (result, error) {
	return pingPong(j, func() error {
		if err := e.post(op, t.Size, to, flags); err != nil {
			return err
		}
		_, err := e.poll()
		return err
	})
}

// stream keeps depth operations outstanding and counts those that complete in the window. One
// in each is signaled.
func (e *end) stream(j job, t test, op iwarp.Op, to offer, depth, each int) (r result, err error) {
	inline := iwarp.SendFlags(0)
	if op == iwarp.OpWrite && t.Size <= 64 {
		inline = iwarp.Inline
	}
	next := e.poll
	if t.Size >= 64*kib { // these complete rarely, so the application sleeps
		next = e.wait
	}
	posted, done := 0, 0
	start := time.Now()
	var from time.Time
	first, busy := 0, 0.0
	for {
		for posted-done < depth {
			flags := inline
			if (posted+1)%each == 0 {
				flags |= iwarp.Signaled
			}
			if err := e.post(op, t.Size, to, flags); errors.Is(err, iwarp.ErrQueueFull) {
				break
			} else if err != nil {
				return r, err
			}
			posted++
		}
		wcs, err := next()
		if err != nil {
			return r, err
		}
		done += len(wcs) * each
		now := time.Now()
		if from.IsZero() {
			if now.Sub(start) >= j.Warm {
				from, first, busy = now, done, cpuBusy()
			}
		} else if took := now.Sub(from); took >= j.Window {
			if each > 1 {
				r.Value = float64(done-first) / float64(took) * 1e3 // M/s
			} else {
				r.Value = float64(done-first) * float64(t.Size) * 8 / float64(took) // Gb/s
				r.CPU = (cpuBusy() - busy) / (float64(done-first) * float64(t.Size) / (1 << 30))
			}
			break
		}
	}
	// Wait for all signaled operations before the connection ends.
	for posted-done >= each {
		wcs, err := next()
		if err != nil {
			return r, err
		}
		done += len(wcs) * each
	}
	return r, nil
}
