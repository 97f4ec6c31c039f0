package verbs

import "strings"

// A row is a program that runs unmodified on two daemons: its server on one, its client on the
// other. See command for the placeholders in both. A row without a server is one program on one
// host.
type row struct {
	group, name    string
	server, client string
	port           int      // TCP port of the server if it listens with the kernel; 0 if it listens with RDMA
	ready          string   // line that the server prints when it listens, if that cannot be seen from outside
	needs          []string // commands that the row's scripts use
	env            string   // set for both programs
	stays          bool     // the server keeps running after its client ends
	fails          string   // why the programs cannot work; they must fail
	long           bool     // only with VERBS=full
	siw            bool     // also runs with Linux's soft-iWARP
	serverFails    string   // why it cannot work with its server on soft-iWARP; it must fail then
	clientFails    string   // the same with its client there
}

// polite comes before a client that should be slower than its server; see refusedBetween.
const polite = "nice -n 19 "

// perftest makes the row of a test of perftest with the same arguments on both sides.
func perftest(program, args string) row {
	r := row{group: "perftest", name: strings.TrimSpace(program + " -R " + args), siw: !strings.Contains(program, "atomic")}
	r.server = program + " -R -F " + args
	if program == "ib_write_lat" {
		r.clientFails = sendsFirst
	}
	r.client = polite + r.server + " ADDR"
	return r
}

// exchanging makes the row of a test of perftest whose sides connect without librdmacm.
func exchanging(program, args string) row {
	r := row{group: "perftest", name: strings.TrimSpace(program + " " + args), env: roce, port: 18515}
	r.server = program + " -F " + args
	r.client = r.server + " ADDR"
	return r
}

// pingpongs makes the row of one of libibverbs' examples.
func pingpongs(args string) row {
	return row{group: "ibverbs-utils", name: args, server: args + " -p 18517", client: args + " -p 18517 ADDR", port: 18517}
}

const roce = "IWARPD_VERBS_TRANSPORT=roce"

func long(r row) row {
	r.long = true
	return r
}

// qperf makes the row of a test of qperf.
func qperf(test string) row {
	r := row{group: "qperf", name: test, server: "qperf", client: "qperf -t 1 -to 60 -cm 1 ADDR " + test, port: 19765, stays: true}
	// siw cannot make the queue pairs of the other tests ("failed to create QP: Invalid argument"), and has neither Immediate Data nor atomics.
	r.siw = test == "rc_lat" || test == "rc_bi_bw"
	return r
}

// fio makes the row of a transfer by fio's RDMA engine, whose options come after its name.
func fio(verb string) row {
	const common = "fio --thread --ioengine=rdma --port=7900 --bs=64k --size=16m"
	return row{
		group: "fio", name: "ioengine=rdma verb=" + verb, siw: true,
		server: common + " --name=server --rw=read --iodepth=16",
		client: common + " --name=client --rw=write --iodepth=8 --hostname=ADDR --verb=" + verb,
	}
}

// waiting returns r with Sends that wait for receives, as InfiniBand's do.
func waiting(r row) row {
	r.env, r.name, r.siw = "IWARPD_VERBS_RECEIVE_WAIT=60000", r.name+" (IWARPD_VERBS_RECEIVE_WAIT)", false
	return r
}

// rsocket makes the row of a test of rsockets, which has the same arguments at both ends.
func rsocket(command string) row {
	return row{
		group: "rdmacm-utils", name: command, server: command + " -b ADDR", client: command + " -s ADDR",
		// With -T a, rstream takes POLLHUP for an error. rdma-core's rpoll, but not iwarpd's, reports it before all is read.
		siw: !strings.Contains(command, "-T a"),
	}
}

// preloaded makes the row of programs that use sockets. librspreload makes rsockets of them.
func preloaded(server, client string) row {
	const preload = "env LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so "
	program, _, _ := strings.Cut(client, " ")
	return row{
		group: "librspreload", name: strings.Replace(client, " -c ADDR", "", 1), needs: []string{program},
		server: preload + server, client: preload + client,
	}
}

// pingpong makes the row of libfabric's fi_pingpong.
func pingpong(provider, endpoint string) row {
	args := "fi_pingpong -p " + provider + " -e " + endpoint + " -I 20"
	return row{group: "libfabric", siw: true, name: "fi_pingpong -p '" + provider + "' -e " + endpoint, server: args, client: args + " ADDR", port: 47592}
}

// iser returns the row of an initiator of libiscsi, with its arguments, that uses a disk of tgtd.
func iser(command string) row {
	program, _, _ := strings.Cut(command, " ")
	return row{
		group: "tgt, libiscsi", name: "tgtd (iSER), " + command, needs: []string{"tgtd", "tgtadm", program},
		server: "@iser ADDR", ready: "ready", stays: true,
		client: command + " -i iqn.2026-01.org.example:client iser://ADDR/iqn.2026-01.org.example:disk/1", long: true,
	}
}

// pyverbs returns the row of tests of rdma-core, all in one class.
func pyverbs(class string, tests ...string) row {
	client := "@pyverbs IFACE"
	for _, test := range tests {
		client += " " + class + "." + test
	}
	return row{group: "pyverbs", name: class, client: client, env: roce, needs: []string{"python3"}}
}

// sendsFirst is why the clients of ucmatose and ib_write_lat on siw wait forever. A responder may send first only after a peer-to-peer set-up (RFC 5044 section
// 7.1.2, RFC 6581), which siw asks for only if it is compiled for that.
const sendsFirst = "its server sends first, and siw asks for no peer-to-peer set-up"

// rows is the table of docs/verbs.md.
func rows() []row {
	rs := []row{
		{group: "rdmacm-utils", siw: true, name: "rping", server: "rping -s -a ADDR -v -C 10", client: "rping -c -a ADDR -v -V -C 10"},
		{group: "rdmacm-utils", siw: true, name: "rping -S 65000", server: "rping -s -a ADDR -v -C 10 -S 65000", client: "rping -c -a ADDR -v -V -C 10 -S 65000"},
		{group: "rdmacm-utils", name: "rping -q", server: "rping -s -a ADDR -v -C 10 -q", client: "rping -c -a ADDR -v -V -C 10 -q"},
		{group: "rdmacm-utils", siw: true, clientFails: sendsFirst, name: "ucmatose", server: "ucmatose -b ADDR", client: "ucmatose -s ADDR"},
		long(row{group: "rdmacm-utils", siw: true, clientFails: sendsFirst, name: "ucmatose -c 20 -C 50", server: "ucmatose -b ADDR -c 20 -C 50", client: "ucmatose -s ADDR -c 20 -C 50"}),
		{group: "rdmacm-utils", siw: true, name: "rdma_client, rdma_server", server: "rdma_server -p 7500", client: "rdma_client -s ADDR -p 7500"},
		{group: "rdmacm-utils", siw: true, name: "rdma_xclient, rdma_xserver", server: "rdma_xserver -p 7501", client: "rdma_xclient -s ADDR -p 7501"},
		{group: "rdmacm-utils", siw: true, name: "cmtime", server: "cmtime -b ADDR -p 7700 -c 20", client: "cmtime -s ADDR -p 7700 -c 20", stays: true},
		rsocket("rstream -S 64 -I 10 -C 500"), long(rsocket("rstream -S 1000000 -I 5 -C 2")),
		rsocket("rstream -S 3000 -I 20 -C 5 -T b -T v"), rsocket("rstream -S 3000 -I 20 -C 5 -T n -T v"),
		rsocket("rstream -S 100000 -I 10 -C 5 -T a -T v"), long(rsocket("rstream -S 3000 -I 20 -C 5 -T r")),
		rsocket("riostream -S 64 -I 10 -C 2 -T v"), long(rsocket("riostream -S 1000000 -I 3 -C 2 -T b -T v")),
		{
			group: "rdmacm-utils", siw: true, name: "rcopy", stays: true,
			server: "rcopy", client: "rcopy /lib/x86_64-linux-gnu/libc.so.6 ADDR:copy",
		},
		{group: "rdmacm-utils", name: "rcopy, 50 MB", server: "rcopy", client: "@rcopy ADDR", stays: true},
		preloaded("iperf3 -s -1", "iperf3 -c ADDR -n 20M"), long(preloaded("iperf3 -s -1", "iperf3 -c ADDR -n 20M -R -P 3")),
		long(preloaded("iperf -s -P 1", "iperf -c ADDR -n 20M")),
		{group: "librspreload", name: "ncat", server: "@ncat ADDR server", client: "@ncat ADDR", needs: []string{"ncat"}},
		qperf("rc_bw"), qperf("rc_lat"), qperf("rc_bi_bw"), qperf("rc_rdma_read_bw"), qperf("rc_rdma_read_lat"), qperf("rc_rdma_write_bw"), qperf("rc_rdma_write_lat"),
		long(qperf("rc_rdma_write_poll_lat")), long(qperf("rc_compare_swap_mr")), long(qperf("rc_fetch_add_mr")),
		pingpongs("ibv_rc_pingpong -g 0"), pingpongs("ibv_rc_pingpong -g 0 -e"), pingpongs("ibv_srq_pingpong -g 0 -n 200"),
		{
			group: "ibverbs-utils", name: "ibv_ud_pingpong -g 0", server: "ibv_ud_pingpong -g 0", client: "ibv_ud_pingpong -g 0 ADDR",
			fails: "iWARP has no datagrams",
		},
		fio("write"), fio("read"), waiting(fio("send")),
		pingpong("verbs", "msg"), long(pingpong("verbs;ofi_rxm", "rdm")),
		iser("iscsi-inq"), iser("iscsi-readcapacity16"), iser("iscsi-perf -t 2 -m 8 -b 64"),
		long(row{
			group: "ceph", name: "ceph-mon, ceph-osd, rados", needs: []string{"ceph-mon", "ceph-osd", "ceph", "rados"},
			server: "@ceph ADDR server", ready: "ready", stays: true, client: "@ceph ADDR",
		}),
		long(row{group: "qemu-system-x86", name: "qemu-system-x86_64, migrate rdma:", server: "@migrate ADDR server", client: "@migrate ADDR", needs: []string{"qemu-system-x86_64"}}),
		long(row{group: "dapl2-utils", name: "dtest", server: "@dapl IFACE", client: "@dapl IFACE -h ADDR", port: 15828, needs: []string{"dtest"}}),
		{group: "librpma", name: "write, flush, read, send", server: "@rpma ADDR server", client: "@rpma ADDR"},
		long(row{group: "libgloo", name: "ibverbs transport, collectives", server: "@gloo", client: "@gloo ADDR", port: 18519, needs: []string{"g++"}}),
		pyverbs("test_rdmacm.CMTestCase", "test_rdmacm_sync_traffic", "test_rdmacm_async_traffic", "test_rdmacm_async_reject_traffic", "test_rdmacm_async_read"),
		long(pyverbs("test_qp.QPTest", "test_create_rc_qp_no_attr", "test_create_rc_qp_with_attr", "test_query_rc_qp")),
		long(pyverbs("test_cq.CQAPITest", "test_create_cq", "test_create_cq_with_comp_channel", "test_create_cq_bad_flow")),
		pyverbs("test_cq_events.CqEventsTestCase", "test_cq_events_rc"),
		long(pyverbs("test_pd.PDTest", "test_alloc_pd", "test_dealloc_pd", "test_multiple_pd_creation", "test_destroy_pd_twice")),
		long(pyverbs("test_mr.MRTest", "test_reg_mr_bad_flags")),
		pyverbs("test_atomic.AtomicTest", "test_atomic_cmp_and_swap", "test_atomic_fetch_and_add"),
		long(pyverbs("test_relaxed_ordering.RoTestCase", "test_ro_rc_traffic")),
		pyverbs("test_device.DeviceTest", "test_dev_list", "test_open_dev", "test_query_device", "test_query_pkey", "test_query_gid", "test_query_gid_table", "test_query_gid_table_bad_flow", "test_query_device_ex", "test_phys_port_cnt_ex", "test_query_port"),
		long(pyverbs("test_fork.ForkAPITest", "test_is_fork_initialized")),
	}
	for _, p := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw"} {
		rs = append(rs, perftest(p, "-n 300"))
		for _, args := range []string{"-s 64 -n 300", "-s 8388608 -n 20", "-q 8 -n 200", "-b -n 300", "-a -n 5"} {
			rs = append(rs, long(perftest(p, args)))
		}
		if p != "ib_write_bw" { // perftest has no events for Writes
			rs = append(rs, long(perftest(p, "-e -n 300")))
		}
	}
	for _, p := range []string{"ib_write_lat", "ib_read_lat", "ib_send_lat"} {
		rs = append(rs, perftest(p, "-n 100"), long(perftest(p, "-s 65536 -n 100")))
	}
	for _, p := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_write_lat", "ib_read_lat", "ib_send_lat", "ib_atomic_bw"} {
		rs = append(rs, exchanging(p, "-n 100"))
	}
	for _, test := range [][2]string{{"ib_write_bw", "-D 2"}, {"ib_read_bw", "-q 64 -b -s 4096 -n 100"}, {"ib_send_bw", "-l 16 -n 160"}, {"ib_send_lat", "-e -n 100"}} {
		r := long(perftest(test[0], test[1]))
		r.siw = false
		rs = append(rs, r)
	}
	return append(rs, perftest("ib_atomic_bw", "-n 300"), long(perftest("ib_atomic_lat", "-n 100")))
}
