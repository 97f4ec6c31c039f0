#!/bin/sh
# Makes nfsv3_xdr.go from go-xdr's copy of RFC 1813's definitions. Names and paths are bytes: as strings they would have to be ASCII.
set -eu
version=$(go list -m -f '{{.Version}}' github.com/buildbarn/go-xdr)
module=$(go list -m -f '{{.Dir}}' github.com/buildbarn/go-xdr)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
out=$PWD/nfsv3_xdr.go
sed -e 's|^package .*|package "github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3";|' \
  -e 's/typedef string \(filename3\|nfspath3\)<>/typedef opaque \1<>/' "$module/pkg/protocols/nfsv3/nfsv3.x" >"$tmp/nfsv3.x"
cd "$tmp"
rm -f "$out" # the compiler does not cut off what an older, longer file has at its end
go run "github.com/buildbarn/go-xdr/cmd/xdr_compiler@$version" -I "$module" -I "$tmp" nfsv3.x "$out"
sed -i 's/\(discriminant .*\)%d/\1%v/' "$out"
gofmt -w "$out"
