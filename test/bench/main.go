// Command bench measures iwarpd and its alternatives in the same run and on the same wire: a
// veth pair between two network namespaces, with one queue each way and one CPU at each end.
//
//	go run ./test/bench [-quick] [-rounds N] [-mtu LIST] [-only REGEXP] [-out FILE]
//	go run ./test/bench hold
//
// The second form only holds memory, as the first does while measuring, until its standard input ends: for test/bench/cp.
//
// Peers: "budget" is an AF_XDP socket alone that does the same work per frame (copy, CRC32c,
// checksum, one acknowledgement for two frames) without a protocol, and "budget-super" the same
// with super-frames; "kernel-tcp-gso" and
// "kernel-tcp-nogso" are the kernel's TCP with and without segmentation offload;
// "daemon-socket" is iwarpd over the kernel's TCP sockets; "libfabric-tcp" and "libfabric-shm"
// are fi_pingpong. The sctp rows are compared with "daemon", iwarpd over TCP, and "usrsctp"
// over raw sockets. The verbs rows are perftest on the filter libraries of client/verbs,
// compared with "iwarpctl-perf", and the cost of registering memory, compared with "touch", the
// first write to it.
//
// Each round runs every arm once, the next round in reversed order. Each cell waits for an idle
// machine. bench prints a table and writes out/bench.json. A ratio is the median of the ratios
// of the rounds; above 1 is better for iwarpd.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/sys/unix"
)

// A row is one line of the table and one element of bench.json.
type row struct {
	Workload string  `json:"workload"`
	MTU      int     `json:"mtu"`
	Size     int     `json:"size"`
	Peer     string  `json:"peer"`
	Unit     string  `json:"unit"`
	Ours     spread  `json:"ours"`
	Theirs   spread  `json:"theirs"`
	Ratio    float64 `json:"ratio"`
	rounds   int
}

type options struct {
	quick    bool
	rounds   int
	mtus     []int
	only     *regexp.Regexp
	out      string
	bin      string
	verbs    string
	idle     time.Duration
	warm     time.Duration
	window   time.Duration
	enforce  bool
	markdown bool
	against  string         // the file of an earlier run to compare with
	plot     string         // the picture to draw from out, instead of measuring
	hold     bool           // hold free memory where the hypervisor takes it back
	crowd    int            // connections to make, instead of measuring
	churn    bool           // measure the latency while programs connect and disconnect, instead
	counters *regexp.Regexp // the counters to print after each measurement; nil: none
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "child" {
		if err := childMain(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 2 && os.Args[1] == "hold" {
		if err := holdMain(); err != nil {
			fmt.Fprintln(os.Stderr, "bench: hold memory:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(os.Args[1:]); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "bench:", err)
		}
		os.Exit(1)
	}
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.BoolVar(&o.quick, "quick", false, "a short run: MTU 1500, 2 rounds, short windows; proves that it works, not how fast")
	fs.IntVar(&o.rounds, "rounds", 0, "rounds (default 5, at least 5 for numbers that mean anything)")
	mtus := fs.String("mtu", "", "MTUs, separated by commas (default 1500,3498,9000)")
	only := fs.String("only", "", "only the cells \"workload/size/mtu/peer\" that this regular expression matches")
	fs.StringVar(&o.out, "out", "out/bench.json", "where the rows go as JSON")
	fs.StringVar(&o.bin, "bin", "bin", "the directory of iwarpd")
	fs.StringVar(&o.verbs, "verbs", "out/verbs", "the directory of iwarpd-run")
	fs.DurationVar(&o.idle, "idle", 8*time.Second, "how long to wait for an idle machine before each cell")
	fs.DurationVar(&o.window, "window", 0, "how long each cell is measured (default 600ms)")
	fs.BoolVar(&o.enforce, "enforce", false, "fail when a floor is missed")
	fs.BoolVar(&o.markdown, "markdown", false, "print the table as Markdown")
	fs.StringVar(&o.against, "against", "", "compare with the rows of an earlier run in this file")
	fs.StringVar(&o.plot, "plot", "", "measure nothing, but draw the rows of the -out file that compare with the kernel's TCP into this SVG file")
	fs.IntVar(&o.crowd, "crowd", 0, "only connect this many queue pairs by two daemons, and print what each costs while all are idle")
	fs.BoolVar(&o.churn, "churn", false, "only measure the latency of Reads in turn without and with programs that connect, register memory and disconnect, and the daemons' garbage collections meanwhile")
	fs.BoolVar(&o.hold, "hold", true, "where the hypervisor takes free memory back, hold most of it while measuring, but for -quick")
	fs.Func("counters", "print how the counters of both ends that match this regular expression changed in each measurement", func(s string) (err error) {
		o.counters, err = regexp.Compile(s)
		return err
	})
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unknown argument %q", fs.Arg(0))
	}
	def := struct {
		rounds int
		mtus   string
		window time.Duration
	}{5, "1500,3498,9000", 600 * time.Millisecond}
	if o.quick {
		def.rounds, def.mtus, def.window = 2, "1500", 150*time.Millisecond
		o.idle = min(o.idle, 500*time.Millisecond)
	}
	if o.rounds == 0 {
		o.rounds = def.rounds
	}
	if o.window == 0 {
		o.window = def.window
	}
	if *mtus == "" {
		*mtus = def.mtus
	}
	o.warm = o.window / 3
	for f := range strings.SplitSeq(*mtus, ",") {
		n, err := strconv.Atoi(f)
		if err != nil || n < 576 || n > 9000 {
			return nil, fmt.Errorf("-mtu %s: each is a number from 576 to 9000", *mtus)
		}
		o.mtus = append(o.mtus, n)
	}
	var err error
	if o.only, err = regexp.Compile(*only); err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	if o.rounds < 1 {
		return nil, fmt.Errorf("-rounds %d: at least 1", o.rounds)
	}
	return o, nil
}

func run(args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.plot != "" {
		rows, err := read(o.out)
		if err != nil {
			return fmt.Errorf("-plot: %w", err)
		}
		return plot(o.plot, rows)
	}
	var before []row
	if o.against != "" {
		if before, err = read(o.against); err != nil {
			return fmt.Errorf("-against: %w", err)
		}
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root: it makes network namespaces")
	}
	if _, err := os.Stat(filepath.Join(o.bin, "iwarpd")); err != nil {
		return fmt.Errorf("%w: run make build, or name its directory with -bin", err)
	}
	l, err := newLab()
	if err != nil {
		return err
	}
	defer l.Close()
	m := &matrix{opt: o, lab: l, got: map[cell][]float64{}, details: map[cell][]result{}, notes: map[string]string{}}
	if m.dir, err = os.MkdirTemp("", "iwarpd-bench"); err != nil {
		return err
	}
	defer os.RemoveAll(m.dir)
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, os.Interrupt, unix.SIGTERM)
	go func() {
		<-sig
		l.Close()
		os.RemoveAll(m.dir)
		os.Exit(130) // every child ends with this process
	}()

	fmt.Println(box())
	if o.crowd > 0 {
		return m.crowd(o.crowd)
	}
	if o.rounds < 5 || o.quick {
		fmt.Println("A short run: the numbers prove nothing.")
	}
	if o.hold && !o.quick {
		release, err := hold()
		if err != nil {
			return err
		}
		defer release()
	}
	if o.churn {
		return m.churn()
	}
	return m.run(before)
}

// run measures all cells and reports them, compared with those of an earlier run.
func (m *matrix) run(before []row) error {
	o := m.opt
	for _, mtu := range o.mtus {
		if err := m.lab.setMTU(mtu); err != nil {
			return err
		}
		m.measure(mtu)
	}
	rows := m.rows()
	if len(rows) == 0 && len(m.failed) == 0 {
		return errors.New("nothing to measure: see -only")
	}
	m.print(rows)
	m.printDetails()
	compare(os.Stdout, before, rows)
	missed := floors(rows)
	if err := write(o.out, rows); err != nil {
		return err
	}
	switch {
	case len(m.failed) > 0:
		return fmt.Errorf("%d cells failed", len(m.failed))
	case o.enforce && missed > 0:
		return fmt.Errorf("%d floors missed", missed)
	}
	return nil
}

// read returns the rows of a file that write wrote. It does not wait for the writer of a FIFO.
func read(name string) (rows []row, err error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return rows, nil
}

// compare prints how the rows differ from those of an earlier run. The ratio to the peer is the
// better measure, since both were measured in the same rounds. The values themselves depend on
// the load of the machine.
func compare(out io.Writer, before, now []row) {
	for _, r := range now {
		i := slices.IndexFunc(before, func(b row) bool {
			return b.Workload == r.Workload && b.MTU == r.MTU && b.Size == r.Size && b.Peer == r.Peer
		})
		if i < 0 {
			continue
		}
		b := before[i]
		fmt.Fprintf(out, "against: %s, %s, MTU %d, %s: %s -> %s %s; ratio %s -> %s (%+.0f %%)\n", r.Workload, sizeName(r.Size), r.MTU, r.Peer,
			short(b.Ours.Median), short(r.Ours.Median), r.Unit, short(b.Ratio), short(r.Ratio), 100*(r.Ratio/b.Ratio-1))
	}
}

// write replaces the file name by the rows atomically.
func write(name string, rows []row) error {
	b, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(name+".new", append(b, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// printDetails prints the distribution of each latency and the CPU time of each bulk transfer.
// Each number is the median of the rounds.
func (m *matrix) printDetails() {
	m.printColumns([]string{"latency", "p50 us", "p99 us", "p99.9 us", "mean us"}, func(r *result) []float64 {
		if r.P99 == 0 {
			return nil
		}
		return []float64{r.Value, r.P99, r.P999, r.Mean}
	})
	m.printColumns([]string{"bulk", "Gb/s", "CPU s/GiB"}, func(r *result) []float64 {
		if r.CPU == 0 {
			return nil
		}
		return []float64{r.Value, r.CPU}
	})
}

// printColumns prints a table with a line for each result that has numbers.
func (m *matrix) printColumns(names []string, numbers func(*result) []float64) {
	t := table.NewWriter()
	t.SetOutputMirror(os.Stdout)
	t.SetStyle(table.StyleLight)
	header := table.Row{names[0], "arm", "MTU"}
	for _, n := range names[1:] {
		header = append(header, n)
	}
	t.AppendHeader(header)
	for _, c := range m.order {
		columns := make([][]float64, len(names)-1) // by round
		for _, r := range m.details[c] {
			for i, v := range numbers(&r) {
				columns[i] = append(columns[i], v)
			}
		}
		if len(columns[0]) == 0 {
			continue
		}
		line := table.Row{c.test.String(), c.arm, c.mtu}
		for _, v := range columns {
			line = append(line, short(median(v)))
		}
		t.AppendRow(line)
	}
	switch {
	case t.Length() == 0:
	case m.opt.markdown:
		t.RenderMarkdown()
	default:
		t.Render()
	}
}

func (m *matrix) print(rows []row) {
	t := table.NewWriter()
	t.SetOutputMirror(os.Stdout)
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{"workload", "size", "MTU", "peer", "unit", "ours min/med/max", "theirs min/med/max", "ratio", "rounds"})
	t.SetColumnConfigs([]table.ColumnConfig{{Name: "size", Align: text.AlignRight}, {Name: "MTU", Align: text.AlignRight},
		{Name: "ours min/med/max", Align: text.AlignRight}, {Name: "theirs min/med/max", Align: text.AlignRight}, {Name: "ratio", Align: text.AlignRight}})
	for i, r := range rows {
		if i > 0 && rows[i-1].Workload != r.Workload {
			t.AppendSeparator()
		}
		t.AppendRow(table.Row{r.Workload, sizeName(r.Size), r.MTU, r.Peer, r.Unit, r.Ours, r.Theirs, short(r.Ratio), r.rounds})
	}
	if m.opt.markdown {
		t.RenderMarkdown()
	} else {
		t.Render()
	}
	for _, k := range slices.Sorted(maps.Keys(m.notes)) {
		fmt.Printf("%s: %s\n", k, m.notes[k])
	}
	if m.busy > 0 {
		fmt.Printf("The machine was not idle before %d of %d measurements.\n", m.busy, m.sessions)
	}
	slices.Sort(m.failed)
	for _, f := range m.failed {
		fmt.Println("failed:", f)
	}
}
