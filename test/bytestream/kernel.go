package main

import (
	"context"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/tcp"
)

// kernel is the kernel's TCP.
type kernel struct {
	o        *options
	listener net.Listener
}

// control sets the options that a socket needs before it is connected.
func (k *kernel) control(_, _ string, rc syscall.RawConn) error {
	var err error
	cerr := rc.Control(func(fd uintptr) {
		if err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, k.o.cc); err != nil {
			return
		}
		// As little waits unsent as with our TCP, so that the end of a run is not spent on draining a buffer.
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, k.o.queue/2)
	})
	if cerr != nil {
		return cerr
	}
	return err
}

func (k *kernel) Listen(local netip.AddrPort, _ int) (err error) {
	lc := net.ListenConfig{Control: k.control}
	lc.SetMultipathTCP(false)
	k.listener, err = lc.Listen(context.Background(), "tcp", local.String())
	return err
}

func (k *kernel) Accept() (stream, error) {
	c, err := k.listener.Accept()
	if err != nil {
		return nil, err
	}
	return kernelStream{c.(*net.TCPConn)}, nil
}

func (k *kernel) Dial(remote netip.AddrPort) (stream, error) {
	d := net.Dialer{Control: k.control, Timeout: k.o.timeout}
	d.SetMultipathTCP(false)
	c, err := d.Dial("tcp", remote.String())
	if err != nil {
		return nil, err
	}
	return kernelStream{c.(*net.TCPConn)}, nil
}

func (k *kernel) Close(*report) error {
	if k.listener != nil {
		return k.listener.Close()
	}
	return nil
}

// kernelStream is a socket.
type kernelStream struct{ *net.TCPConn }

// Stats returns what TCP_INFO has in common with our own statistics.
func (s kernelStream) Stats() (st tcp.Stats, ok bool) {
	rc, err := s.SyscallConn()
	if err != nil {
		return st, false
	}
	err = rc.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		ok = true
		st.SegsOut, st.SegsIn = uint64(info.Segs_out), uint64(info.Segs_in)
		st.Retransmits = uint64(info.Total_retrans)
		st.MSS, st.PMTU = int(info.Snd_mss), int(info.Pmtu)
		st.Cwnd = int(info.Snd_cwnd) * int(info.Snd_mss)
		st.BytesOut, st.BytesIn = info.Bytes_acked, info.Bytes_received
		st.DSACKIn = uint64(info.Dsack_dups)
	})
	return st, ok && err == nil
}
