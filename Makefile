# Building, testing and releasing iwarpd. `make help` lists the targets.

GO      ?= go
OUT     := out
VERSION := $(shell deploy/version)
LDFLAGS := -s -w -X main.version=$(VERSION)

# The race detector needs cgo, which needs a C compiler.
RACE = $(shell command -v gcc >/dev/null 2>&1 && echo -race)

# Packages tested only without the race detector: the protocol cores have no goroutines (internal/arch checks that),
# and programs that a test runs are built without it. internal/bench and test/bench count
# allocations and time, which it changes. dataplane is tested both ways.
# Those with it and those without are two streams, which run at the same time: many packages of test/ mostly wait for programs,
# and the longest of them, which run one test at a time, begin first. The programs are compiled as these packages are, so that
# each package is compiled once for both.
# make lint vets all packages, so the tests do not.
NORACE = /(tcp|tcp/gvisor|tcp/kernel|sctp|sctp/session|mpa|ddp|rdmap|rpcrdma/wire|rpcrdma/session|docs/site|internal/arch|internal/bench|test/bench|test/clib|test/kerneltcp|test/packages|test/sctp-peer|test/system|test/tutorial|test/upgrade|test/verbs)$$
TEST = $(GO) test -vet=off -pgo=off -timeout 20m $(TESTFLAGS)
PLAIN = env CGO_ENABLED=0 $(TEST) -trimpath
RACED = $(TEST) $(RACE)

# The tests of the C libraries with the sanitizers, which are slow to compile and to run.
SANITIZED = ^TestSanitized

# The packages that are built, tested and checked together: those of the modules of go.work, except the device
# plugin, images and chart.
PACKAGES = ./... ./cmd/iwarpctl/... ./rpcrdma/... ./test/bench/...

.DEFAULT_GOAL := build
.PHONY: build programs image docs clib verbs packages packages-check release generate lint test test-system sanitize upgrade-test mutate demo transcript bench profile plot interop interop-nfs interop-sctp interop-nic interop-verbs clean help

build: programs ## build bin/iwarpd, bin/iwarpctl and bin/iwarpd-device-plugin
	CGO_ENABLED=0 $(GO) build -C cmd/iwarpd-device-plugin -trimpath -ldflags '$(LDFLAGS)' -o $(CURDIR)/bin/ .

programs: # without the device plugin, which needs many more modules
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/iwarpd ./cmd/iwarpctl

clib: ## build the C library and its example into out/libiwarpd
	@.ci/need gcc:gcc /usr/include/stdlib.h:libc6-dev protoc-c:protobuf-c-compiler /usr/include/protobuf-c/protobuf-c.h:libprotobuf-c-dev pkg-config:pkg-config
	$(MAKE) -C client/c O=$(CURDIR)/$(OUT)/libiwarpd

docs: ## the documentation site into out/site, with its links checked
	@.ci/need mkdocs:mkdocs /usr/share/doc/mkdocs-material:mkdocs-material dot:graphviz
	@docs/site/build

image: ## an OCI image for amd64 and arm64 into out/image, the same byte for byte from the same commit
	@deploy/image/build

VERBS_PROGRAMS = rping:rdmacm-utils ibv_devinfo:ibverbs-utils ib_write_bw:perftest qperf:qperf fio:fio fi_pingpong:libfabric-bin \
	tgtd:tgt iscsi-inq:libiscsi-bin /usr/include/librpma.h:librpma-dev /usr/share/doc/python3-pyverbs:python3-pyverbs iperf3:iperf3 ncat:ncat
VERBS_NEED = gcc:gcc /usr/include/stdlib.h:libc6-dev protoc-c:protobuf-c-compiler /usr/include/protobuf-c/protobuf-c.h:libprotobuf-c-dev pkg-config:pkg-config \
	/usr/include/infiniband/verbs.h:libibverbs-dev /usr/include/rdma/rdma_cma.h:librdmacm-dev

verbs: ## build libibverbs.so.1 and librdmacm.so.1 over iwarpd, and iwarpd-run, into out/verbs
	@.ci/need $(VERBS_NEED)
	$(MAKE) -C client/verbs O=$(CURDIR)/$(OUT)/verbs VERBSDIR=$(CURDIR)/$(OUT)/verbs

packages: build ## .deb and .rpm packages into out/packages
	@.ci/need $(VERBS_NEED)
	@deploy/packages/build

packages-check: packages ## install the .deb packages in a fresh Debian root and run the daemon there (needs root, network)
	@.ci/need debootstrap:debootstrap lintian:lintian ip:iproute2
	PACKAGES_DIR=$(CURDIR)/$(OUT)/packages $(GO) test -count=1 -v ./test/packages

release: packages ## packages, the programs and their checksums into out/release
	@deploy/packages/release

generate: ## regenerate the generated files (needs clang, libbpf-dev and protoc)
	@.ci/need clang:clang llvm-strip:llvm /usr/include/bpf/bpf_helpers.h:libbpf-dev protoc:protobuf-compiler
	$(GO) generate $(PACKAGES)

lint: ## formatting, vet, staticcheck, the import table, generated files up to date
	@PACKAGES='$(PACKAGES)' .ci/lint

test: ## unit tests and simulations, as root also in namespaces, with the race detector
	@.ci/need ip:iproute2 ethtool:ethtool nft:nftables gcc:gcc /usr/include/stdlib.h:libc6-dev runc:runc systemd-analyze:systemd
	@status=0; list="$(GO) list $(PACKAGES) ./cmd/iwarpd-device-plugin/..."; \
	{ $(RACED) -p 3 -shuffle=on $$($$list | grep -v /test/ | grep -vE '$(NORACE)'); first=$$?; \
	  TRANSPORT=socket $(RACED) ./client/embed && exit $$first; } & \
	$(PLAIN) -p 3 -shuffle=on $$($$list | grep -v /test/ | grep -E '$(NORACE)') ./dataplane || status=1; \
	$(PLAIN) -run NoAllocs ./client/embed || status=1; \
	wait $$! || status=1; \
	exit $$status

# Go's cache of results does not see the sources in C, so nothing comes from it here.
test-system: ## the built programs and libraries in namespaces, with other peers and with hostile ones (root)
	@.ci/need ip:iproute2 ethtool:ethtool nft:nftables tshark:tshark /usr/include/usrsctp.h:libusrsctp-dev systemd-analyze:systemd $(VERBS_NEED) $(VERBS_PROGRAMS)
	@status=0; list="$(GO) list $(PACKAGES)"; \
	{ $(RACED) -count=1 -shuffle=on $$($$list | grep /test/ | grep -vE '$(NORACE)'); first=$$?; \
	  TRANSPORT=socket $(RACED) -count=1 ./test/adversary ./test/isolation && \
	  $(PLAIN) -count=1 -run HostileClient ./test/isolation && \
	  TRANSPORT=both $(PLAIN) -count=1 -run HostileClient ./test/isolation && exit $$first; } & \
	$(PLAIN) -count=1 -p 3 -shuffle=on -skip '$(SANITIZED)' $$($$list | grep /test/ | grep -E '$(NORACE)' | sort -r) || status=1; \
	wait $$! || status=1; \
	exit $$status

sanitize: ## the tests of the C libraries with the sanitizers of gcc (root)
	@.ci/need $(VERBS_NEED) $(VERBS_PROGRAMS) ip:iproute2
	$(PLAIN) -count=1 -shuffle=on -run '$(SANITIZED)' ./test/clib ./test/verbs

upgrade-test: packages ## replace the daemon 50 times under clients in Go and C, also by dpkg and systemd (root)
	UPGRADES=50 PACKAGES_DIR=$(CURDIR)/$(OUT)/packages $(GO) test -count=1 -timeout 20m -v ./test/upgrade

mutate: ## break what the rows of docs/conformance-*.md name, and see their tests fail; out/mutate.txt
	@mkdir -p $(OUT)
	$(GO) run ./test/mutate -o $(OUT)/mutate.txt $(MUTATEFLAGS)

demo: programs ## a file of 256 MiB there and back by RDMA between two namespaces, with checks and figures
	@mkdir -p $(OUT)
	@CGO_ENABLED=0 $(GO) build -o $(OUT)/iwarpd-demo ./test/demo
	@exec $(OUT)/iwarpd-demo $(DEMOFLAGS)

transcript: build ## replace the sample output in README.md by that of real runs (root)
	@docs/transcript

bench: build ## measure against the budget, kernel TCP and libfabric; writes out/bench.json
	@mkdir -p $(OUT)
	@.ci/need fi_pingpong:libfabric-bin gcc:gcc /usr/include/stdlib.h:libc6-dev /usr/include/usrsctp.h:libusrsctp-dev
	$(GO) run -pgo cmd/iwarpd/default.pgo ./test/bench $(BENCHFLAGS)

profile: ## record cmd/iwarpd/default.pgo, by which the compiler optimizes the daemon (root)
	@mkdir -p $(OUT)
	CGO_ENABLED=0 $(GO) test -trimpath -run '^$$' -bench Veth -cpuprofile $(CURDIR)/$(OUT)/cpu.prof -o $(OUT)/dataplane.test ./dataplane
	$(GO) tool pprof -proto -output cmd/iwarpd/default.pgo $(OUT)/cpu.prof

plot: ## draw out/bench.json, which make bench wrote, into out/speed.svg
	$(GO) run ./test/bench -plot $(OUT)/speed.svg

interop: build ## against Linux's soft-iWARP in a virtual machine
	@test/interop/run
	@TRANSPORT=socket test/interop/run -b default -s "64 65000"
	@test/interop/impaired
	@test/interop/kernel

interop-nfs: build ## Linux's NFS client, in a virtual machine, on an export of ours; our client on it
	@test/interop/nfs
	@test/interop/nfs -u -f 60 -d 500 -m 16 -n 1
	@test/interop/nfs2

interop-sctp: build ## DDP over SCTP, with the SCTP of Linux in a virtual machine
	@test/interop/sctp

interop-nic: build ## on the drivers of network cards that QEMU has, in virtual machines with a new kernel
	@test/interop/nic

interop-verbs: ## unmodified RDMA programs of Debian on two daemons, with SIW=1 against soft-iWARP too; out/interop-verbs.md (root)
	@.ci/need $(VERBS_NEED) $(VERBS_PROGRAMS) ip:iproute2 ethtool:ethtool qemu-system-x86_64:qemu-system-x86 dtest:dapl2-utils iperf:iperf \
		ceph-mon:ceph-mon ceph-osd:ceph-osd rados:ceph-common g++:g++ /usr/include/gloo/context.h:libgloo-dev
	@mkdir -p $(OUT)
	@VERBS=full VERBS_TABLE=$(CURDIR)/$(OUT)/interop-verbs.md $(GO) test -count=1 -timeout 60m -v ./test/verbs >$(OUT)/interop-verbs.log 2>&1; status=$$?; \
	cat $(OUT)/interop-verbs.md; grep -E '^ *--- FAIL|^(ok|FAIL)|_test.go.*(FAIL|skip)' $(OUT)/interop-verbs.log; \
	echo "$$(grep -c '| pass |' $(OUT)/interop-verbs.md) rows pass, $$(grep -c '| FAIL' $(OUT)/interop-verbs.md) fail; the log is $(OUT)/interop-verbs.log"; exit $$status

clean: ## remove what the other targets made
	rm -rf bin $(OUT)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
