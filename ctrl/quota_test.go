package ctrl

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// reqQuotas asks for the quotas.
func reqQuotas() *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_ListQuotas{ListQuotas: &ctrlpb.ListQuotas{}}}
}

// quota returns a quota of the client's own user, as the daemon lists it.
func (c *tclient) quota(name string) *ctrlpb.Quota {
	c.t.Helper()
	for _, u := range c.ok(reqQuotas()).GetQuotas().GetUsers() {
		if i := slices.IndexFunc(u.Quotas, func(q *ctrlpb.Quota) bool { return q.Name == name }); i >= 0 && u.Uid == uint32(os.Getuid()) {
			return u.Quotas[i]
		}
	}
	c.t.Fatalf("no quota %q is listed", name)
	return nil
}

// TestListQuotas: the list has what the user holds over all its clients, and the
// limit of the rule that is its own.
func TestListQuotas(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{QPs: 7, Registered: 1 << 20}})
	a, b := h.hello(t), h.hello(t)
	a.qp()
	b.qp()
	a.ok(reqMR(a.pd(), 8192), memfd(t, 8192))
	if q := b.quota("qps"); q.Used != 2 || q.Limit != 7 || q.Bytes || q.Key != "max-qps" {
		t.Errorf("queue pairs: %v", q)
	}
	if q := b.quota("registered"); q.Used != 8192 || q.Limit != 1<<20 || !q.Bytes {
		t.Errorf("registered memory: %v", q)
	}
	a.c.Close()
	for b.quota("clients").Used != 1 {
	}
	if q := b.quota("registered"); q.Used != 0 {
		t.Errorf("registered memory of a client that is gone: %v", q)
	}
	b.c.Close()
	h.settled(t)
}

// TestQuotaTable: each resource has a name, and a limit that the configuration or
// a default gives.
func TestQuotaTable(t *testing.T) {
	l := DefaultLimits
	for r, q := range quotas {
		if q.name == "" || q.noun == "" || q.limit(&l) == 0 || q.key != "" && !strings.HasPrefix(q.key, "max-") {
			t.Errorf("resource %d: %q, %q, key %q, default %d", r, q.name, q.noun, q.key, q.limit(&l))
		}
	}
}
