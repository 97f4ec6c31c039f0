package ctrl

//go:generate sh -c "cd .. && go build -o ctrl/.protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go && protoc --plugin=protoc-gen-go=ctrl/.protoc-gen-go --go_out=. --go_opt=module=github.com/iwarpd/iwarpd ctrl/iwarpd.proto; rm -f ctrl/.protoc-gen-go"
