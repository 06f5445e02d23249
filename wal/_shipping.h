/*
 * Batches on their way from a node's log to its members, while all who follow stand where the log ends: read from the
 * segment, sent, and acknowledged, without the interpreter's lock. Part of wal/_native.c.
 *
 * Nothing is decided here. Python decides what is committed (wal.replication.proposer), and is woken once that may have
 * risen: when the log's own sync and as many members as it asked for are further than reported. Python handles all that
 * members send but Acks, and all that goes wrong, too.
 */

#include <sys/epoll.h>

#define MEMBERS_MAX 16
#define OTHERS_BYTES_MAX 512
#define SHIPPED_BYTES_MAX ((1 << 20) + BATCH_RECORD_BYTES) /* as CHUNK_BYTES in wal.replication.proposer, about */
#define READ_AHEAD_BYTES (4 << 10)
#define APPEND_HEAD_BYTES_MAX (FRAME_HEAD_AT + 2 + 6 * 9)
#define CALLED ((uint64_t)1 << 32) /* as in wal.replication.wires: Python wakes itself so */
#define NEWS_S 0.02                /* no Ack is kept from Python for longer */
#define IS_CLOSED (-1)

typedef struct {
    int socket, error; /* what errno was, or IS_CLOSED */
    unsigned long long acked_lsn, timed_lsn;
    double timed_since_s, took_s; /* since when an Ack of timed_lsn is waited for; how long the last took, or -1 */
    long long under_way;          /* bytes */
    int is_received;
    size_t unsent;                /* of the last frame */
    size_t others;                /* what of it is no Ack, or not all of one */
    unsigned char others_bytes[OTHERS_BYTES_MAX];
} Member;

typedef struct {
    Queue *queue;
    int epoll, wake_fd, file, enough, is_any;
    unsigned long long epoch, sent_lsn, committed_lsn, settled_lsn, reported_lsn, durable_lsn;
    long long offset, sent_bytes, under_way_max;
    double until_s;
    int needs_python, is_news;
    Member members[MEMBERS_MAX];
    int count;
    unsigned char head[APPEND_HEAD_BYTES_MAX]; /* of the last frame, and its batch, which the queue keeps */
    size_t head_bytes, batch_bytes;
} Shipping;

/* Room for so much of a batch, with what was there. */
static int room_to_ship(Queue *queue, size_t size)
{
    if (size <= queue->shipped_size)
        return 1;
    unsigned char *const larger = PyMem_RawRealloc(queue->shipped, size);
    if (larger == NULL)
        return 0;
    queue->shipped = larger;
    queue->shipped_size = size;
    return 1;
}

/* Read the batch behind what was sent: its last LSN, 0 when it does not stand there, or is Python's. */
static uint64_t read_batch(Shipping *shipping, uint64_t written_lsn)
{
    Queue *const queue = shipping->queue;
    const size_t guess = queue->shipped_bytes + READ_AHEAD_BYTES; /* it is as long as the one before, or a bit longer */
    if (!room_to_ship(queue, guess))
        return 0;
    ssize_t has = pread(shipping->file, queue->shipped, guess, shipping->offset);
    if (has < BATCH_RECORD_BYTES)
        return 0;
    const size_t size = BATCH_RECORD_BYTES + (size_t)u32_at(queue->shipped + RECORD_HEADER_BYTES + 16);
    if (size > SHIPPED_BYTES_MAX || !room_to_ship(queue, size))
        return 0;
    while ((size_t)has < size) {
        const ssize_t more = pread(shipping->file, queue->shipped + has, size - (size_t)has, shipping->offset + has);
        if (more <= 0)
            return 0;
        has += more;
    }
    shipping->batch_bytes = queue->shipped_bytes = size;
    const uint64_t last_lsn = last_lsn_of(queue->shipped, size, shipping->sent_lsn + 1, queue->node_hash);
    return last_lsn <= written_lsn ? last_lsn : 0;
}

/* The beginning of the Append that carries the batch. */
static void begin_append(Shipping *shipping)
{
    unsigned char *const head = shipping->head, *at = head + FRAME_HEAD_AT;
    *at++ = 0x95;
    at = put_uint(at, shipping->epoch);
    *at++ = 0x92;
    at = put_uint(put_uint(at, shipping->epoch), shipping->sent_lsn);
    at = put_uint(put_uint(put_uint(at, shipping->epoch), shipping->committed_lsn), shipping->settled_lsn);
    shipping->head_bytes = (size_t)(at - head);
    seal_frame(head, shipping->head_bytes, APPEND_KIND, shipping->queue->shipped, shipping->batch_bytes);
}

/* Send the batch behind what was sent to everybody; 0 when Python is needed. */
static int ship_batch(Shipping *shipping, uint64_t written_lsn)
{
    const uint64_t last_lsn = read_batch(shipping, written_lsn);
    if (last_lsn == 0)
        return 0;
    for (int i = 0; i < shipping->count; i++)
        if (shipping->members[i].under_way >= shipping->under_way_max)
            return 0;
    begin_append(shipping);
    const size_t whole = shipping->head_bytes + shipping->batch_bytes;
    int is_sent = 1;
    for (int i = 0; i < shipping->count; i++) {
        Member *const member = &shipping->members[i];
        struct iovec parts[] = {{shipping->head, shipping->head_bytes}, {shipping->queue->shipped, shipping->batch_bytes}};
        const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t done;
        do
            done = sendmsg(member->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (done < 0 && errno == EINTR);
        if (done < 0 && errno != EAGAIN)
            member->error = errno;
        member->unsent = whole - (size_t)(done < 0 ? 0 : done);
        member->under_way += (long long)shipping->batch_bytes;
        if (member->timed_lsn == 0) {
            member->timed_lsn = last_lsn;
            member->timed_since_s = seconds();
        }
        is_sent &= member->unsent == 0;
    }
    shipping->sent_lsn = last_lsn;
    shipping->sent_bytes += (long long)shipping->batch_bytes;
    shipping->offset += (long long)shipping->batch_bytes;
    return is_sent;
}

/* The LSN of an Ack of this epoch; 0 when the frame is anything else. */
static uint64_t acked_of(const unsigned char *frame, size_t whole, uint64_t epoch)
{
    uint64_t of_epoch, lsn;
    const unsigned char *at = frame + FRAME_HEAD_AT, *const end = head_end_of(frame, whole, ACK_KIND);
    if (end != frame + whole)
        return 0;
    at = take_uint(take_uint(take_array(at, end, 2), end, &of_epoch), end, &lsn);
    return at == end && of_epoch == epoch && lsn <= INT64_MAX ? lsn : 0;
}

/* Receive from a member; 0 when some of it is Python's. */
static int receive_acks(Shipping *shipping, Member *member)
{
    const ssize_t count = recv(member->socket, member->others_bytes + member->others, OTHERS_BYTES_MAX - member->others,
                               MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (count <= 0) {
        member->error = count == 0 ? IS_CLOSED : errno;
        return 0;
    }
    size_t at = 0, whole;
    member->others += (size_t)count;
    member->is_received = 1;
    while (member->others - at >= FRAME_PREFIX_BYTES
           && (whole = LENGTH_AT + (size_t)u32_at(member->others_bytes + at)) <= member->others - at) {
        const uint64_t lsn = acked_of(member->others_bytes + at, whole, shipping->epoch);
        if (lsn == 0)
            break;
        at += whole;
        shipping->is_news = 1;
        if (lsn > member->acked_lsn)
            member->acked_lsn = lsn;
        if (member->timed_lsn != 0 && lsn >= member->timed_lsn) {
            member->took_s = seconds() - member->timed_since_s;
            member->timed_lsn = 0;
        }
    }
    member->others -= at;
    memmove(member->others_bytes, member->others_bytes + at, member->others);
    return member->others < FRAME_PREFIX_BYTES;
}

/* What so many members and the log itself hold: how far it may be committed. */
static uint64_t reach_of(const Shipping *shipping)
{
    uint64_t reach = 0;
    if (shipping->enough == 0)
        return shipping->durable_lsn;
    for (int i = 0; i < shipping->count; i++) {
        const uint64_t lsn = shipping->members[i].acked_lsn;
        int as_far = 0;
        for (int j = 0; j < shipping->count; j++)
            as_far += shipping->members[j].acked_lsn >= lsn;
        if (as_far >= shipping->enough && lsn > reach)
            reach = lsn;
    }
    return reach < shipping->durable_lsn ? reach : shipping->durable_lsn;
}

/* Wait for a wake-up or a member, and take in what there is; 0 when time is up. */
static int await_news(Shipping *shipping)
{
    struct epoll_event found[MEMBERS_MAX + 2];
    const double now_s = seconds();
    double left_s = shipping->until_s - now_s;
    if (shipping->is_news && left_s > NEWS_S)
        left_s = NEWS_S;
    const int count = epoll_wait(shipping->epoll, found, MEMBERS_MAX + 2, left_s <= 0 ? 0 : (int)(left_s * 1e3) + 1);
    if (count < 0 && errno != EINTR)
        shipping->needs_python = 1;
    for (int i = 0; i < count; i++) {
        int member = 0;
        uint64_t woken = 0;
        while (member < shipping->count && shipping->members[member].socket != found[i].data.fd)
            member++;
        if (found[i].data.fd == shipping->wake_fd)
            shipping->needs_python |= read(shipping->wake_fd, &woken, sizeof woken) == sizeof woken && woken >= CALLED;
        else
            shipping->needs_python |= member == shipping->count || !receive_acks(shipping, &shipping->members[member]);
    }
    return count != 0;
}

static void ship_on(Shipping *shipping)
{
    for (;;) {
        /* In this order: what is written is not less. */
        shipping->durable_lsn = (uint64_t)__atomic_load_n(&shipping->queue->durable_lsn, __ATOMIC_ACQUIRE);
        const uint64_t written_lsn = (uint64_t)__atomic_load_n(&shipping->queue->written_lsn, __ATOMIC_ACQUIRE);
        while (!shipping->needs_python && shipping->sent_lsn < written_lsn)
            shipping->needs_python = !ship_batch(shipping, written_lsn);
        if (shipping->needs_python || (shipping->is_any && shipping->is_news) || reach_of(shipping) > shipping->reported_lsn
            || !await_news(shipping))
            return;
    }
}

/* ship(epoll, wake_fd, members, epoch, sent_lsn, committed_lsn, settled_lsn, file, offset, enough, is_any,
 * reported_lsn, under_way_max, until_s): as wal.native.Ship says. Other threads run meanwhile. */
static PyObject *ship(Queue *queue, PyObject *args)
{
    Shipping shipping = {.queue = queue};
    PyObject *members;
    if (!PyArg_ParseTuple(args, "iiO!KKKKiLipKLd", &shipping.epoll, &shipping.wake_fd, &PyList_Type, &members,
                          &shipping.epoch, &shipping.sent_lsn, &shipping.committed_lsn, &shipping.settled_lsn,
                          &shipping.file, &shipping.offset, &shipping.enough, &shipping.is_any, &shipping.reported_lsn,
                          &shipping.under_way_max, &shipping.until_s))
        return NULL;
    if (PyList_GET_SIZE(members) > MEMBERS_MAX)
        return PyErr_Format(PyExc_ValueError, "more than %d members", MEMBERS_MAX);
    for (; shipping.count < PyList_GET_SIZE(members); shipping.count++) {
        Member *const member = &shipping.members[shipping.count];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(members, shipping.count), "iKLKd", &member->socket, &member->acked_lsn,
                              &member->under_way, &member->timed_lsn, &member->timed_since_s))
            return NULL;
        member->took_s = -1;
    }
    Py_BEGIN_ALLOW_THREADS
    ship_on(&shipping);
    Py_END_ALLOW_THREADS
    PyObject *answers = PyList_New(shipping.count);
    for (int i = 0; i < shipping.count && answers != NULL; i++) {
        const Member *const member = &shipping.members[i];
        PyObject *const frame = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)member->unsent);
        if (frame != NULL && member->unsent > 0) {
            const size_t of_batch = member->unsent < shipping.batch_bytes ? member->unsent : shipping.batch_bytes;
            const size_t of_head = member->unsent - of_batch;
            put(put((unsigned char *)PyBytes_AS_STRING(frame), shipping.head + shipping.head_bytes - of_head, of_head),
                queue->shipped + shipping.batch_bytes - of_batch, of_batch);
        }
        if (!set_item(answers, i,
                      Py_BuildValue("(KOy#NiKdd)", member->acked_lsn, member->is_received ? Py_True : Py_False,
                                    (const char *)member->others_bytes, (Py_ssize_t)member->others, frame,
                                    member->error, member->timed_lsn, member->timed_since_s, member->took_s)))
            Py_CLEAR(answers);
    }
    if (answers == NULL)
        return NULL;
    return Py_BuildValue("(OKLLKKN)", shipping.needs_python ? Py_True : Py_False, shipping.sent_lsn, shipping.sent_bytes,
                         shipping.offset, shipping.durable_lsn, (unsigned long long)reach_of(&shipping), answers);
}
