package main

import "testing"

// TestUnseen checks when a driver is considered to have lost the XDP program.
func TestUnseen(t *testing.T) {
	type period struct {
		seen, came uint64 // more than in the previous period
		lost       bool
	}
	for name, periods := range map[string][]period{
		"idle":                       {{}, {}, {}, {}},
		"working":                    {{90, 90, false}, {1, 90, false}, {90, 90, false}},
		"lost":                       {{90, 90, false}, {0, 4, false}, {0, 4, true}},
		"lost and still so":          {{9, 9, false}, {0, 9, false}, {0, 9, true}, {0, 9, false}, {0, 9, false}},
		"lost, healed, lost":         {{9, 9, false}, {0, 9, false}, {0, 9, true}, {9, 9, false}, {0, 9, false}, {0, 9, true}},
		"few frames":                 {{9, 9, false}, {0, 1, false}, {0, 1, false}, {0, 1, false}},
		"slowly":                     {{9, 9, false}, {0, 1, false}, {0, 2, false}, {0, 1, true}},
		"few frames between":         {{9, 9, false}, {0, 9, false}, {0, 0, false}, {0, 1, true}},
		"counted late by the driver": {{90, 0, false}, {0, 90, false}, {90, 0, false}, {0, 90, false}},
	} {
		u := unseen{seen: 7, came: 1000}
		seen, came := u.seen, u.came
		for i, p := range periods {
			seen, came = seen+p.seen, came+p.came
			if lost := u.lost(seen, came); lost != p.lost {
				t.Errorf("%s: period %d: lost %v", name, i, lost)
			}
		}
	}
	// Counters of another interface with this name start at 0.
	u := unseen{seen: 7, came: 1000}
	for range 3 {
		if u.lost(7, 2) {
			t.Error("lost after the interface was replaced")
		}
	}
	if u.lost(7, 3) || !u.lost(7, 6) || u.missed != 4 {
		t.Errorf("%d frames were missed; want 4, counted from those of the new interface", u.missed)
	}
}
