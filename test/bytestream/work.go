package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/tcp"
)

// report is what the program prints.
type report struct {
	Stack, Do string
	Conns     int
	Done      int // connections that have ended
	// Sent and Received count the bytes of all connections. The hashes are the exclusive or of those of each connection.
	Sent, Received         int64
	SentHash, ReceivedHash string
	// Seconds is the time from the first byte that any connection received to the last.
	Seconds float64
	// MBps is the sum of the rates of all connections, each from its first received byte to its last, in units of
	// 1,000,000 bytes per second.
	MBps float64
	// Requests is the number of answered requests. The times are those of their round trips.
	Requests         int     `json:",omitempty"`
	P50, P99         float64 `json:",omitempty"` // µs
	Errors           []string
	TCP              []tcp.Stats       `json:",omitempty"` // of the first connections
	Engine           []dataplane.Stats `json:",omitempty"` // at the end, when everything is closed
	Left             int               // connections that the engine still has
	HeapMiB          float64
	Goroutines       int
	OpenSeconds      []float64 `json:",omitempty"` // hold: until all of a cycle were open
	mu               sync.Mutex
	sentSum, recvSum [32]byte
	first, last      time.Time
	rtts             []time.Duration
}

func (r *report) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.Errors) < 10 {
		r.Errors = append(r.Errors, err.Error())
	}
}

func (r *report) finish() {
	r.SentHash, r.ReceivedHash = hex.EncodeToString(r.sentSum[:8]), hex.EncodeToString(r.recvSum[:8])
	r.Seconds = r.last.Sub(r.first).Seconds()
	if n := len(r.rtts); n > 0 {
		slices.Sort(r.rtts)
		us := func(q float64) float64 { return float64(r.rtts[int(q*float64(n-1))].Nanoseconds()) / 1e3 }
		r.Requests, r.P50, r.P99 = n, us(0.5), us(0.99)
	}
}

// tally counts one direction of a connection.
type tally struct {
	n           int64
	hash        hash.Hash
	first, last time.Time // of what was received
}

func newTally() *tally { return &tally{hash: sha256.New()} }

func (t *tally) add(b []byte) { t.n += int64(len(b)); t.hash.Write(b) }

func (r *report) addTallies(sent, recv *tally) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Done++
	r.Sent += sent.n
	r.Received += recv.n
	xor := func(sum *[32]byte, t *tally) {
		if t.n > 0 {
			for i, b := range t.hash.Sum(nil) {
				sum[i] ^= b
			}
		}
	}
	xor(&r.sentSum, sent)
	xor(&r.recvSum, recv)
	if !recv.first.IsZero() && (r.first.IsZero() || recv.first.Before(r.first)) {
		r.first = recv.first
	}
	if recv.last.After(r.last) {
		r.last = recv.last
	}
	if d := recv.last.Sub(recv.first); d > 0 {
		r.MBps += float64(recv.n) / d.Seconds() / 1e6
	}
}

// work runs the workload on one connection.
func work(o *options, r *report, s stream, number int) error {
	sent, recv := newTally(), newTally()
	defer r.addTallies(sent, recv)
	var err error
	switch o.do {
	case "receive":
		err = receive(o, s, recv, nil)
	case "echo":
		err = receive(o, s, recv, sent)
	case "both":
		done := make(chan error, 1)
		go func() { done <- receive(o, s, recv, nil) }()
		if err = send(o, s, sent, number); err == nil {
			err = s.CloseWrite()
		}
		err = errors.Join(err, <-done)
	case "send", "request":
		if o.do == "send" {
			err = send(o, s, sent, number)
		} else {
			recv.first = time.Now()
			err = request(o, r, s, sent, recv)
			recv.last = time.Now()
		}
		if err == nil {
			err = s.CloseWrite()
		}
		if err == nil {
			err = receive(o, s, recv, nil)
		}
	default:
		err = fmt.Errorf("do what? %q", o.do)
	}
	if st, ok := s.Stats(); ok && number < 8 {
		r.mu.Lock()
		r.TCP = append(r.TCP, st)
		r.mu.Unlock()
	}
	if cerr := s.Close(); cerr != nil {
		err = errors.Join(err, fmt.Errorf("close: %w", cerr))
	}
	return err
}

// receive reads to the end of the stream. If echo is not nil, it sends back what it reads, and counts it there.
func receive(o *options, s stream, recv, echo *tally) error {
	size := 128 << 10
	if o.conns > 64 {
		size = 2 << 10
	}
	b := make([]byte, size)
	for {
		n, err := s.Read(b)
		if n > 0 {
			recv.last = time.Now()
			if recv.first.IsZero() {
				recv.first = recv.last
			}
			recv.add(b[:n])
		}
		if n > 0 && echo != nil {
			echo.add(b[:n])
			if _, err := s.Write(b[:n]); err != nil {
				return fmt.Errorf("write: %w", err)
			}
		}
		if errors.Is(err, io.EOF) {
			recv.last = time.Now()
			return nil
		}
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
	}
}

// send sends random bytes, a given number of them or for a given time.
func send(o *options, s stream, sent *tally, number int) error {
	rng := rand.New(rand.NewPCG(o.seed, uint64(number)))
	block := make([]byte, 1<<20+8191) // a prime length, so that the pieces differ
	for i := range block {
		block[i] = byte(rng.Uint32())
	}
	until := time.Now().Add(o.time)
	const piece = 64 << 10
	for at := 0; o.bytes > 0 && sent.n < o.bytes || o.bytes == 0 && time.Now().Before(until); {
		n := min(piece, len(block)-at)
		if o.bytes > 0 {
			n = int(min(int64(n), o.bytes-sent.n))
		}
		if _, err := s.Write(block[at : at+n]); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		sent.add(block[at : at+n])
		if at += n; at == len(block) {
			at = 0
		}
	}
	return nil
}

// request sends requests, each after the answer to the one before.
func request(o *options, r *report, s stream, sent, recv *tally) error {
	q, a := make([]byte, o.size), make([]byte, o.size)
	rng := rand.New(rand.NewPCG(o.seed, 99))
	until := time.Now().Add(o.time)
	var rtts []time.Duration
	for i := int64(0); o.bytes > 0 && i < o.bytes || o.bytes == 0 && time.Now().Before(until); i++ {
		for j := range q {
			q[j] = byte(rng.Uint32())
		}
		t := time.Now()
		if _, err := s.Write(q); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		sent.add(q)
		if _, err := io.ReadFull(s, a); err != nil {
			return fmt.Errorf("read: %w", err)
		}
		recv.add(a)
		rtts = append(rtts, time.Since(t))
	}
	r.mu.Lock()
	r.rtts = append(r.rtts, rtts...)
	r.mu.Unlock()
	return nil
}

func serve(o *options, st stack, r *report) error {
	local, err := netip.ParseAddrPort(o.listen)
	if err != nil {
		return err
	}
	if err := st.Listen(local, o.backlog); err != nil {
		return err
	}
	fmt.Println("ready")
	served := make(chan struct{})
	go func() {
		defer close(served)
		var wg sync.WaitGroup
		defer wg.Wait()
		for i := 0; o.cycles == 0 || i < o.conns*o.cycles; i++ {
			s, err := st.Accept()
			if err != nil {
				r.fail(err)
				return
			}
			wg.Go(func() {
				if err := work(o, r, s, i); err != nil {
					r.fail(fmt.Errorf("connection %d: %w", i, err))
				}
			})
		}
	}()
	if o.cycles == 0 {
		_, _ = io.Copy(io.Discard, os.Stdin)
		return nil
	}
	<-served
	return nil
}

func call(o *options, st stack, r *report) error {
	remote, err := netip.ParseAddrPort(o.connect)
	if err != nil {
		return err
	}
	if o.do == "hold" {
		return hold(o, st, r, remote)
	}
	for cycle := range o.cycles {
		var wg sync.WaitGroup
		for i := range o.conns {
			s, err := st.Dial(remote)
			if err != nil {
				return fmt.Errorf("connection %d: %w", i, err)
			}
			wg.Go(func() {
				if err := work(o, r, s, cycle*o.conns+i); err != nil {
					r.fail(fmt.Errorf("connection %d: %w", i, err))
				}
			})
		}
		wg.Wait()
	}
	return nil
}

// hold opens all connections. When all are open it sends a byte in both directions on each and closes them. It repeats
// this for each cycle.
func hold(o *options, st stack, r *report, remote netip.AddrPort) error {
	for range o.cycles {
		began := time.Now()
		all := make([]stream, o.conns)
		var wg sync.WaitGroup
		places := make(chan struct{}, 256)
		for i := range all {
			places <- struct{}{}
			wg.Go(func() {
				defer func() { <-places }()
				s, err := st.Dial(remote)
				if err != nil {
					r.fail(fmt.Errorf("connection %d: %w", i, err))
					return
				}
				all[i] = s
			})
		}
		wg.Wait()
		r.OpenSeconds = append(r.OpenSeconds, time.Since(began).Seconds())
		for i, s := range all {
			if s == nil {
				continue
			}
			wg.Go(func() {
				err := exchange(r, s, byte(i))
				if cerr := s.Close(); cerr != nil {
					err = errors.Join(err, fmt.Errorf("close: %w", cerr))
				}
				if err != nil {
					r.fail(fmt.Errorf("connection %d: %w", i, err))
				}
			})
		}
		wg.Wait()
	}
	return nil
}

// exchange sends one byte, receives it back, and closes both directions.
func exchange(r *report, s stream, v byte) error {
	sent, recv := newTally(), newTally()
	defer r.addTallies(sent, recv)
	b := []byte{v}
	if _, err := s.Write(b); err != nil {
		return err
	}
	sent.add(b)
	if _, err := io.ReadFull(s, b); err != nil {
		return err
	}
	recv.add(b)
	if b[0] != v {
		return fmt.Errorf("said %d, heard %d", v, b[0])
	}
	if err := s.CloseWrite(); err != nil {
		return err
	}
	if n, err := s.Read(b); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("%d bytes and %v behind the last", n, err)
	}
	return nil
}
