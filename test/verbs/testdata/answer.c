/*
 * Which completed Writes wait for an answer, and for how long, by a clock of our own. A worker
 * shares the CPU if shared is set, and the answer comes after so many microseconds as delay
 * says.
 */
#include "../../../client/verbs/answer.c"

#include <stdio.h>
#include <stdlib.h>

static int64_t now_ns;
static int64_t answer_at = -1; /* in microseconds; -1: none comes */
static bool shared = true;
static uint32_t received;

int clock_gettime(clockid_t clock, struct timespec *t)
{
	(void)clock;
	t->tv_sec = now_ns / 1000000000;
	t->tv_nsec = now_ns % 1000000000;
	return 0;
}

uint32_t iwarpd_received(const struct iwarpd_device *dev)
{
	(void)dev;
	if (answer_at >= 0 && now_ns >= answer_at * 1000) {
		answer_at = -1;
		received++;
	}
	return received;
}

bool iwarpd_yield(const struct iwarpd_device *dev)
{
	(void)dev;
	now_ns += shared ? 4000 : 300;
	return shared;
}

static struct context context = { .sends = SOLE };
static struct ibv_comp_channel channel;
static struct cq cq = { .lock = PTHREAD_MUTEX_INITIALIZER };
static struct qp qp = { .ctx = &context, .ibv.send_cq = &cq.ibv }, other = { .ctx = &context, .ibv.send_cq = &cq.ibv, .ibv.qp_num = 1 };

struct context *iwv_context_of(struct ibv_context *ibv)
{
	(void)ibv;
	return &context;
}

/* write_and_poll completes a Write whose answer comes after delay, and returns how long the completion waited. */
static int write_and_poll(int delay)
{
	int64_t began;
	int us;

	now_ns += 10000;
	began = now_ns;
	answer_posted(&qp);
	answer_at = delay < 0 ? -1 : began / 1000 + delay;
	us = answer_wait(&cq);
	if (us > 0)
		await_answer(&cq, us);
	return (int)((now_ns - began) / 1000);
}

/* answer is when a late answer comes: after its completion was reported. */
static void late(void)
{
	if (answer_at >= 0)
		now_ns = answer_at * 1000;
	iwarpd_received(NULL);
}

static void expect(const char *what, int got, int least, int most)
{
	if (got >= least && got <= most)
		return;
	printf("%s: %d, not from %d to %d\n", what, got, least, most);
	exit(1);
}

int main(void)
{
	int n, waited;

	/* Without answers each wait is followed by twice as many completions that do not wait. */
	for (n = 1, waited = 0; n <= 4096; n *= 2) {
		expect("a wait in vain", write_and_poll(-1), SOON, SOON + 4);
		for (int i = 0; i < (n < MOST_REST ? n : MOST_REST); i++)
			waited += write_and_poll(-1);
	}
	expect("what the others waited", waited, 0, 0);

	/* With answers each completion waits for its answer, and no longer. */
	for (n = 0; n < 2 * TRUSTED; n++)
		expect("a wait for an answer after 7 us", write_and_poll(7), 7, 11);

	/* Then it waits longer once. */
	expect("a wait for a late answer", write_and_poll(3000), 3000, 3004);
	expect("a wait for the next late answer", write_and_poll(3000), SOON, SOON + 4);
	late();

	/* An answer that came before the completion was polled is as good, but does not show that waiting helps. */
	for (n = 0; n < TRUSTED; n++)
		expect("a wait for an answer that is here", write_and_poll(0), 0, 0);
	expect("a wait after one in vain", write_and_poll(-1), 0, 0);
	expect("a wait for an answer after a second", write_and_poll(1000000), LATE, LATE + 4);
	late();
	for (n = 0; n < 10 * MOST_REST; n++)
		write_and_poll(7);

	/* An answer that came after its completion is not one to the next Write. */
	write_and_poll(1000000);
	late();
	expect("a completion after a wait in vain", write_and_poll(7), 0, 0);
	late();
	expect("a wait after a late answer", write_and_poll(7), 7, 11);

	/*
	 * A program that answers requests, of which some take another Write, and whose peer goes on
	 * after a Send. The answers to the last Writes never come while their completions wait.
	 */
	for (int requests = 1; requests <= TRUSTED; requests *= TRUSTED) {
		for (n = 0, waited = 0; n < MOST_REST; n++) {
			for (int i = 0; i < requests; i++)
				waited += write_and_poll(0);
			waited += write_and_poll(-1);
		}
		expect("waits for answers that cannot come", waited, 5 * SOON, 12 * LATE);
	}

	/* Nothing waits if the program sends on another queue pair too, or has a completion channel. */
	for (n = 0; n < 10 * MOST_REST; n++)
		write_and_poll(7);
	answer_posted(&other);
	for (n = 0; n < SOLE; n++)
		expect("a wait with two queue pairs", write_and_poll(7), 0, 0);
	cq.ibv.channel = &channel;
	expect("a wait with a completion channel", write_and_poll(7), 0, 0);
	cq.ibv.channel = NULL;
	late();
	write_and_poll(0);
	expect("a wait without them", write_and_poll(7), 7, 11);

	/* Without a worker on this CPU nothing waits for more than some yields. */
	shared = false;
	expect("a wait on a CPU of its own", write_and_poll(50), 0, 3);
	late();
	for (n = 0, waited = 0; n < ALONE; n++)
		waited += write_and_poll(-1);
	expect("waits after that", waited, 0, 0);
	return 0;
}
