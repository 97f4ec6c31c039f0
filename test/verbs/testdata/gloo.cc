// gloo [ADDRESS]: rank 0, or rank 1 that finds it at that address, of collective operations over gloo's ibverbs transport.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/ibverbs/device.h>

static const int size = 2;

#define CHECK(x)                                                           \
	do {                                                               \
		if (!(x)) {                                                \
			fprintf(stderr, "line %d: failed: %s\n", __LINE__, #x); \
			_exit(1);                                          \
		}                                                          \
	} while (0)

// A Store passes what a rank sets to the other rank, by TCP: strings after their lengths.
class Store : public gloo::rendezvous::Store {
public:
	explicit Store(int fd) : fd_(fd) {}

	void set(const std::string &key, const std::vector<char> &data) override
	{
		send(std::vector<char>(key.begin(), key.end()));
		send(data);
	}

	std::vector<char> get(const std::string &key) override
	{
		while (has_.count(key) == 0) {
			std::vector<char> name = receive();
			has_[std::string(name.begin(), name.end())] = receive();
		}
		return has_[key];
	}

	void wait(const std::vector<std::string> &keys) override
	{
		for (const auto &key : keys)
			get(key);
	}

private:
	void send(const std::vector<char> &data)
	{
		uint32_t n = data.size();
		CHECK(::send(fd_, &n, sizeof(n), 0) == sizeof(n) && ::send(fd_, data.data(), n, 0) == ssize_t(n));
	}

	std::vector<char> receive()
	{
		uint32_t n;
		CHECK(recv(fd_, &n, sizeof(n), MSG_WAITALL) == sizeof(n));
		std::vector<char> data(n);
		CHECK(recv(fd_, data.data(), n, MSG_WAITALL) == ssize_t(n));
		return data;
	}

	int fd_;
	std::map<std::string, std::vector<char>> has_;
};

static int meet(const char *address)
{
	sockaddr_in a = {};
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	a.sin_family = AF_INET;
	a.sin_port = htons(18519);
	if (address) {
		CHECK(inet_pton(AF_INET, address, &a.sin_addr) == 1 && connect(fd, (sockaddr *)&a, sizeof(a)) == 0);
		return fd;
	}
	CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0);
	CHECK(bind(fd, (sockaddr *)&a, sizeof(a)) == 0 && listen(fd, 1) == 0);
	return accept(fd, nullptr, nullptr);
}

// reduce adds up values of both ranks, several times by the same buffers. These are never freed: gloo ends a program that
// frees one whose last send has not completed.
template <typename Algorithm> static void reduce(std::shared_ptr<gloo::Context> context, int rank, int n)
{
	auto &data = *new std::vector<float>(n);
	auto &sum = *new Algorithm(context, {data.data()}, n);

	for (int turn = 0; turn < 5; turn++) {
		for (int i = 0; i < n; i++)
			data[i] = rank + turn + i % 100;
		sum.run();
		for (int i = 0; i < n; i++)
			CHECK(data[i] == 1 + 2 * (turn + i % 100));
	}
}

int main(int argc, char **argv)
{
	int rank = argc > 1;
	gloo::transport::ibverbs::attr attr = {"", 1, 0}; // the first device, port and GID
	auto device = gloo::transport::ibverbs::CreateDevice(attr);
	Store store(meet(argv[1]));
	auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);

	context->connectFullMesh(store, device);
	for (int n : {1, 1000, 1000000}) {
		reduce<gloo::AllreduceRingChunked<float>>(context, rank, n);
		reduce<gloo::AllreduceHalvingDoubling<float>>(context, rank, n);
	}
	int word = rank ? 0 : 42;
	(new gloo::BroadcastOneToAll<int>(context, {&word}, 1))->run();
	CHECK(word == 42);
	(new gloo::BarrierAllToAll(context))->run();
	store.set("done", {1});
	store.get("done");
	_exit(0);
}
