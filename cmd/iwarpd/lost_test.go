package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestFramesLost(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	ctx, cancel := context.WithCancel(t.Context())
	var n uint64
	var err error
	tick, done := make(chan time.Time), make(chan struct{})
	asked := make(chan struct{})
	go func() {
		defer close(done)
		framesLost{what: "they are lost", count: func() (uint64, error) {
			defer func() { asked <- struct{}{} }()
			return n, err
		}}.watch(ctx, zap.New(core), "eth0", tick)
	}()
	for i, step := range []struct {
		n    uint64
		err  error
		want int
	}{
		{0, nil, 0},
		{3, nil, 1},
		{3, nil, 1},
		{9, nil, 1}, // too soon
		{9, errors.New("no map"), 1},
	} {
		n, err = step.n, step.err
		tick <- time.Time{}
		<-asked
		tick <- time.Time{} // the previous tick was handled
		<-asked
		if logs.Len() != step.want {
			t.Fatalf("step %d: %d warnings, want %d", i, logs.Len(), step.want)
		}
	}
	n, err = 9, nil
	for range lostQuiet {
		tick <- time.Time{}
		<-asked
	}
	cancel()
	<-done
	all := logs.All()
	if len(all) != 2 {
		t.Fatalf("%d warnings in all, want 2", len(all))
	}
	for i, want := range []uint64{3, 6} {
		if f := all[i].ContextMap(); f["frames"] != want || f["interface"] != "eth0" {
			t.Errorf("warning %d: %v, want %d frames", i, f, want)
		}
	}
}
