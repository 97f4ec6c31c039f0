#!/bin/sh
# Makes store_xdr.go from store.x.
set -eu
version=$(go list -m -f '{{.Version}}' github.com/buildbarn/go-xdr)
module=$(go list -m -f '{{.Dir}}' github.com/buildbarn/go-xdr)
out=$PWD/store_xdr.go
in=$PWD
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
rm -f "$out" # the compiler does not cut off what an older, longer file has at its end
go run "github.com/buildbarn/go-xdr/cmd/xdr_compiler@$version" -I "$module" -I "$in" store.x "$out"
gofmt -w "$out"
