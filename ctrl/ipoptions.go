package ctrl

import (
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

// ipOptions returns the fields of IP and VLAN headers that a client requests. def has the
// defaults.
func ipOptions(def dataplane.IPOptions, w *ctrlpb.Startup) (o dataplane.IPOptions, err error) {
	o = def
	if w == nil {
		return o, nil
	}
	for _, f := range []struct {
		name        string
		want        *uint32
		least, most uint32
		set         *uint8
	}{
		{"DSCP", w.Dscp, 0, 63, &o.DSCP},
		{"TTL", w.Ttl, 1, 255, &o.TTL},
		{"VLAN priority", w.Priority, 0, 7, &o.Priority},
	} {
		if f.want == nil {
			continue
		}
		if *f.want < f.least || *f.want > f.most {
			return o, errorf(invalid, "ctrl: a %s is %d to %d, not %d", f.name, f.least, f.most, *f.want)
		}
		*f.set = uint8(*f.want)
	}
	return o, nil
}
