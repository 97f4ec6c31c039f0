package shm

import (
	"testing"

	"github.com/iwarpd/iwarpd/verbs"
)

func newSQ(t testing.TB, entries, maxSGE, maxInline int) (*SQ, *SQProducer) {
	t.Helper()
	q, err := CreateSQ(entries, maxSGE, maxInline)
	if err != nil {
		t.Fatal(err)
	}
	p, err := MapSQ(q.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); q.Close() })
	return q, p
}

func newRQ(t testing.TB, entries, maxSGE int) (*RQ, *RQProducer) {
	t.Helper()
	q, err := CreateRQ(entries, maxSGE)
	if err != nil {
		t.Fatal(err)
	}
	p, err := MapRQ(q.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); q.Close() })
	return q, p
}

func newCQ(t testing.TB, workers, entries int) (*CQ, *CQConsumer) {
	t.Helper()
	q, err := CreateCQ(workers, entries)
	if err != nil {
		t.Fatal(err)
	}
	c, err := MapCQ(q.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); q.Close() })
	return q, c
}

// newBells returns both ends of a doorbell page, and the alarm on which its worker sleeps.
func newBells(t testing.TB, bits int) (d *Doorbells, r *DoorbellRinger, alarm *Alarm) {
	t.Helper()
	d, err := CreateDoorbells(bits)
	if err != nil {
		t.Fatal(err)
	}
	if alarm, err = NewAlarm(); err != nil {
		t.Fatal(err)
	}
	if err := alarm.Watch(d.WakeFD()); err != nil {
		t.Fatal(err)
	}
	alarm.Clear() // it is readable at first
	if r, err = MapDoorbells(d.FD(), d.WakeFD()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); d.Close(); alarm.Close() })
	return d, r, alarm
}

// newSendWR returns a work request with room for as many SGEs and bytes as the limits allow, like a QP's scratch.
func newSendWR() *verbs.SendWR {
	return &verbs.SendWR{SGEs: make([]verbs.SGE, 0, verbs.MaxSGE), Inline: make([]byte, 0, verbs.MaxInline)}
}

func newRecvWR() *verbs.RecvWR { return &verbs.RecvWR{SGEs: make([]verbs.SGE, 0, verbs.MaxSGE)} }
