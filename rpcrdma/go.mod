module github.com/iwarpd/iwarpd/rpcrdma

go 1.26.3

replace github.com/iwarpd/iwarpd => ../

require (
	github.com/buildbarn/go-xdr v0.0.0-20261005144839-a2095890273e
	github.com/google/go-cmp v0.7.0
	github.com/iwarpd/iwarpd v0.0.0-00010101000000-000000000000
	golang.org/x/sys v0.49.0
)

require (
	github.com/asavie/xdp v0.3.3 // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/safchain/ethtool v0.7.0 // indirect
	github.com/stretchr/testify v1.12.1 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	go.uber.org/zap v1.28.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
