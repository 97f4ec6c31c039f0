module github.com/iwarpd/iwarpd/test/bench

go 1.26.3

replace github.com/iwarpd/iwarpd => ../..

replace github.com/iwarpd/iwarpd/rpcrdma => ../../rpcrdma

require (
	github.com/HdrHistogram/hdrhistogram-go v1.4.0
	github.com/iwarpd/iwarpd v0.0.0-00010101000000-000000000000
	github.com/iwarpd/iwarpd/rpcrdma v0.0.0-00010101000000-000000000000
	github.com/jedib0t/go-pretty/v6 v6.8.3
	github.com/safchain/ethtool v0.7.0
	github.com/vishvananda/netlink v1.3.1
	github.com/vishvananda/netns v0.0.5
	golang.org/x/sys v0.49.0
)

require (
	github.com/asavie/xdp v0.3.3 // indirect
	github.com/buildbarn/go-xdr v0.0.0-20261005144839-a2095890273e // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/mattn/go-runewidth v0.0.16 // indirect
	github.com/rivo/uniseg v0.4.7 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	go.uber.org/zap v1.28.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
