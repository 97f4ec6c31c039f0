package testenv

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Count returns the number of seeds, repetitions or connections of a test: the environment variable
// name, or def if that is not set.
func Count(t testing.TB, name string, def int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s: want a number from 1 on", name, s)
	}
	return n
}

// Choices are the bytes of a fuzz target's input that it has not used. Once they run out every choice is 0.
type Choices []byte

// Byte returns the next byte.
func (c *Choices) Byte() byte {
	if len(*c) == 0 {
		return 0
	}
	b := (*c)[0]
	*c = (*c)[1:]
	return b
}

// Uint16 returns the next two bytes as a number in network order.
func (c *Choices) Uint16() int { return int(c.Byte())<<8 | int(c.Byte()) }

// Scripts runs a fuzz target on random bytes: on n of them, or as many as SEEDS says, each longer than 20 bytes by less
// than more.
func Scripts(t *testing.T, n, more int, run func(*testing.T, []byte)) {
	from := Seed(t)
	for seed := from; seed < from+uint64(Count(t, "SEEDS", n)); seed++ {
		r := rand.New(rand.NewPCG(seed, 96))
		b := make([]byte, 20+r.IntN(more))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		if !t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { run(t, b) }) {
			break
		}
	}
}
