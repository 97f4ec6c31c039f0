module github.com/iwarpd/iwarpd/cmd/iwarpctl

go 1.26.3

replace github.com/iwarpd/iwarpd => ../..

replace github.com/iwarpd/iwarpd/rpcrdma => ../../rpcrdma

require (
	github.com/gopacket/gopacket v1.7.7
	github.com/iwarpd/iwarpd v0.0.0-00010101000000-000000000000
	github.com/iwarpd/iwarpd/rpcrdma v0.0.0-00010101000000-000000000000
	github.com/jedib0t/go-pretty/v6 v6.8.3
	github.com/spf13/cobra v1.10.2
	github.com/spf13/pflag v1.0.10
	golang.org/x/sys v0.49.0
	golang.org/x/term v0.47.0
	google.golang.org/protobuf v1.36.12
)

require (
	github.com/HdrHistogram/hdrhistogram-go v1.4.0 // indirect
	github.com/asavie/xdp v0.3.3 // indirect
	github.com/buildbarn/go-xdr v0.0.0-20261005144839-a2095890273e // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/cpuguy83/go-md2man/v2 v2.0.7 // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	github.com/mattn/go-runewidth v0.0.16 // indirect
	github.com/rivo/uniseg v0.4.7 // indirect
	github.com/russross/blackfriday/v2 v2.1.0 // indirect
	github.com/safchain/ethtool v0.7.0 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	github.com/zeebo/blake3 v0.2.4 // indirect
	github.com/zeebo/xxh3 v1.1.0 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	go.uber.org/zap v1.28.0 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/text v0.42.0 // indirect
)
