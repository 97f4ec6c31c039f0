package seqpacket

import (
	"os"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestGroups checks that the peer's groups are those that the kernel recorded when the
// connection was made, however many they are.
func TestGroups(t *testing.T) {
	for _, n := range []int{0, 1, 64, 65, 1000} {
		want, groups := []uint32{54321}, make([]int, n)
		for i := range groups {
			groups[i] = 70000 + i
			want = append(want, uint32(groups[i]))
		}
		testenv.AsUser(t, 12345, 54321, groups, func() {
			a, b, err := Pair()
			if err != nil {
				t.Error(err)
				return
			}
			defer a.Close()
			defer b.Close()
			got, err := a.Groups()
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%d groups: got %d, %v", n, len(got), err)
			}
		})
	}
}

// TestOwnGroups is TestGroups without privileges.
func TestOwnGroups(t *testing.T) {
	a, _ := pair(t)
	got, err := a.Groups()
	if err != nil || got[0] != uint32(os.Getegid()) {
		t.Fatal(got, err)
	}
	own, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range own {
		if !slices.Contains(got, uint32(g)) {
			t.Errorf("group %d is missing of %v", g, got)
		}
	}
	a.Close()
	if got, err := a.Groups(); err == nil {
		t.Errorf("of a closed connection: %v", got)
	}
}
