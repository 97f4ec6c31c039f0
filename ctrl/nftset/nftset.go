// Package nftset follows sets of nftables whose elements are addresses, so that a firewall's set can
// name the peers of the daemon.
package nftset

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// A Name names a set.
type Name struct {
	Family     nftables.TableFamily
	Table, Set string
}

var families = map[string]nftables.TableFamily{"inet": nftables.TableFamilyINet, "ip": nftables.TableFamilyIPv4, "ip6": nftables.TableFamilyIPv6, "netdev": nftables.TableFamilyNetdev, "bridge": nftables.TableFamilyBridge, "arp": nftables.TableFamilyARP}

// Parse parses a list of sets in the notation of nft(8), separated by commas: "inet filter
// peers4, inet filter peers6".
func Parse(list string) (names []Name, err error) {
	if list == "" {
		return nil, nil
	}
	for v := range strings.SplitSeq(list, ",") {
		f := strings.Fields(v)
		if len(f) != 3 || families[f[0]] == 0 {
			return nil, fmt.Errorf("%q: must be the family of a table (inet, ip, ip6, netdev, bridge or arp), the table and the set, like inet filter rdma_peers", strings.TrimSpace(v))
		}
		n := Name{families[f[0]], f[1], f[2]}
		if slices.Contains(names, n) {
			return nil, fmt.Errorf("%v: is listed twice", n)
		}
		names = append(names, n)
	}
	return names, nil
}

// String returns the name in the notation of nft(8).
func (n Name) String() string {
	for name, family := range families {
		if family == n.Family {
			return name + " " + n.Table + " " + n.Set
		}
	}
	return fmt.Sprintf("family %d %s %s", n.Family, n.Table, n.Set)
}

// Fix returns the command that creates the set.
func (n Name) Fix() string {
	table := strings.TrimSuffix(n.String(), " "+n.Set)
	kind := nftables.TypeIPAddr.Name
	if n.Family == nftables.TableFamilyIPv6 {
		kind = nftables.TypeIP6Addr.Name
	}
	return fmt.Sprintf("nft 'add table %s; add set %v { type %s; flags interval; }'", table, n, kind)
}

// errUnusable is the error of a set whose elements are not addresses.
var errUnusable = errors.New("it is not a set of ipv4_addr or ipv6_addr: make it again with such a type")

// Check returns an error if n cannot be read as a set of addresses. The error is an
// fs.ErrNotExist if there is no such set.
func Check(n Name) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	_, err = read(c, n)
	return err
}

// An edge is an address at which an interval of a set begins or ends.
type edge struct {
	from netip.Addr
	in   bool
}

// compare orders edges by address. If one interval begins where another ends, the beginning is last.
func (e edge) compare(o edge) int {
	if c := e.from.Compare(o.from); c != 0 || e.in == o.in {
		return c
	}
	if o.in {
		return -1
	}
	return 1
}

// A set is the content of a set at one point in time.
type set struct {
	edges     []edge // sorted; all of one family
	intervals bool
	aging     bool // changes without events, by time-outs or by packets
}

func (s set) contains(a netip.Addr) bool {
	if len(s.edges) == 0 || s.edges[0].from.BitLen() != a.BitLen() {
		return false
	}
	i, found := slices.BinarySearchFunc(s.edges, edge{a, true}, edge.compare)
	return found || i > 0 && s.edges[i-1].in
}

// with returns the set after changes, and false if it cannot be known from them.
func (s set) with(changes []change) (set, bool) {
	if s.aging {
		return s, false
	}
	s.edges = slices.Clone(s.edges)
	for _, c := range changes {
		for _, e := range edgesOf(c.element, s.intervals) {
			i, found := slices.BinarySearchFunc(s.edges, e, edge.compare)
			switch {
			case found && c.gone:
				s.edges = slices.Delete(s.edges, i, i+1)
			case !found && !c.gone:
				s.edges = slices.Insert(s.edges, i, e)
			}
		}
	}
	return s, true
}

// read reads the set n.
func read(c *nftables.Conn, n Name) (set, error) {
	is, err := c.GetSetByName(&nftables.Table{Name: n.Table, Family: n.Family}, n.Set)
	if err != nil {
		return set{}, err
	}
	addresses := is.KeyType.Name == nftables.TypeIPAddr.Name || is.KeyType.Name == nftables.TypeIP6Addr.Name
	if is.IsMap || !addresses {
		return set{}, errUnusable
	}
	elements, err := c.GetSetElements(is)
	if err != nil {
		// The library's error names the cause only in its text.
		if _, gone := c.GetSetByName(is.Table, n.Set); errors.Is(gone, fs.ErrNotExist) {
			err = gone
		}
		return set{}, err
	}
	return newSet(elements, is.Interval, is.HasTimeout || is.Dynamic), nil
}

// newSet returns a set of elements.
func newSet(elements []nftables.SetElement, intervals, aging bool) set {
	s := set{intervals: intervals, aging: aging}
	for _, e := range elements {
		s.edges = append(s.edges, edgesOf(e, intervals)...)
	}
	slices.SortFunc(s.edges, edge.compare)
	return s
}

// edgesOf returns the edges of an element. In a set of intervals an element is the first address of
// an interval, or the first address after it. The last interval may have no end.
func edgesOf(e nftables.SetElement, intervals bool) (all []edge) {
	a, ok := netip.AddrFromSlice(e.Key)
	if !ok {
		return nil
	}
	all = append(all, edge{a, !e.IntervalEnd})
	if !intervals && a.Next().IsValid() {
		all = append(all, edge{a.Next(), false})
	}
	return all
}
