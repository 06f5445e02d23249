/*
 * The queue of the WAL, and the writer's loop over it, without the interpreter's lock (docs/decisions/0037); and batches
 * that go over the wire: checked, received as a stream (_stream.h), and sent (_shipping.h).
 *
 * Their twins in Python, which are the specification, are wal.queue.Queue, wal.reader, and what
 * wal.replication.safekeeper and leading do where this module is not there. CRC-32 is made by the processor's
 * instructions where it has them for carry-less products, and by zlib, found in the library that Python has loaded,
 * else and for short ends. Without zlib the module cannot be imported.
 *
 * A record is framed when it is appended, into chunks of memory that are queued one behind the other; nothing of Python's
 * is kept. The writer's thread takes what is framed, sums it, writes, syncs, checks the name and wakes those that wait. What
 * is not common it leaves to Python: a segment that is full, the first space written ahead, the look at the folder, the
 * end.
 *
 * Who appends has the interpreter's lock, and then takes that of the queue. Under the lock of the queue nothing of
 * Python's is made or let go of, since that may run any code, and no system call is made but for memory.
 */

#include "../ledger/_native.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FOLDS 1
#endif

#define RECORD_HEADER_BYTES 34
#define BATCH_RECORD_BYTES 58
#define BATCH_BODY_BYTES_MAX (64LL << 20)
#define BATCH_RECORD_TYPE 16
#define RECORD_BYTES_MAX (16 << 20)
#define LENGTH_AT 4
#define LSN_AT 8
#define HLC_AT 16
#define HLC_BYTES 16
#define STATE_AT 32
#define TYPE_AT 33
#define NODE_HASH_BYTES 4
#define LINGER_ENTRIES_MIN 2 /* as in wal.queue */
#define LINGER_PART 3        /* as in wal.queue */
#define HALF_MIN 16          /* as in wal.queue */
#define HALF_AFTER 3         /* as in wal.queue */
#define DURABLE_BATCHES_MAX 4096 /* as in wal.queue */
#define AHEAD_FROM_BYTES (64 << 10) /* as in wal.log */
#define AHEAD_BYTES (512 << 10)     /* as in wal.log */
#define AHEAD_BATCHES 2             /* as in wal.log */

#define IS_LATE 1

#define CHUNK_BYTES (256 << 10)
#define FREE_CHUNKS_MAX 4
/* Of two chunks that follow each other, more than CHUNK_BYTES are used, or the first would hold what the second does. */
#define PIECES_MAX (2 * (BATCH_BODY_BYTES_MAX / CHUNK_BYTES) + 4) /* below IOV_MAX, which is 1,024 */

static unsigned long (*zlib_crc32)(unsigned long, const unsigned char *, unsigned int);

#ifdef FOLDS
#define FOLDED_MIN 64
#define BLOCK 16

static int folds; /* whether the processor can */

/* Carry block over what follows it, at the distance that the constants are of. */
#define FOLD(block, constants)                                                                                          \
    _mm_xor_si128(_mm_clmulepi64_si128(block, constants, 0x00), _mm_clmulepi64_si128(block, constants, 0x11))
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))

/* CRC-32 of whole blocks, four at the least, as in "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction" (Intel, 2009), whose constants these are; crc is inverted, and so is what comes back. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc32_of_blocks(uint32_t crc, const unsigned char *at,
                                                                         size_t count)
{
    const __m128i by_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_one = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i to_64 = _mm_set_epi64x(0, 0x163cd6124), reduce = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    const unsigned char *const end = at + count;
    __m128i a = _mm_xor_si128(LOAD(at), _mm_cvtsi32_si128((int)crc)), b = LOAD(at + BLOCK);
    __m128i c = LOAD(at + 2 * BLOCK), d = LOAD(at + 3 * BLOCK);
    for (at += 4 * BLOCK; end - at >= 4 * BLOCK; at += 4 * BLOCK) {
        a = _mm_xor_si128(FOLD(a, by_four), LOAD(at));
        b = _mm_xor_si128(FOLD(b, by_four), LOAD(at + BLOCK));
        c = _mm_xor_si128(FOLD(c, by_four), LOAD(at + 2 * BLOCK));
        d = _mm_xor_si128(FOLD(d, by_four), LOAD(at + 3 * BLOCK));
    }
    b = _mm_xor_si128(FOLD(a, by_one), b);
    c = _mm_xor_si128(FOLD(b, by_one), c);
    a = _mm_xor_si128(FOLD(c, by_one), d);
    for (; at < end; at += BLOCK)
        a = _mm_xor_si128(FOLD(a, by_one), LOAD(at));

    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_one, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), to_64, 0x00));
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), reduce, 0x10), low);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, _mm_clmulepi64_si128(b, reduce, 0x00)), 1);
}
#endif

/* CRC-32 of what crc is of, and of these bytes behind it, fewer than 4 GiB: zlib's, where the processor has nothing
 * faster. */
static uint32_t crc32_on(uint32_t crc, const unsigned char *at, size_t count)
{
#ifdef FOLDS
    if (folds && count >= FOLDED_MIN) {
        const size_t blocks = count & ~(size_t)(BLOCK - 1);
        crc = ~crc32_of_blocks(~crc, at, blocks);
        at += blocks;
        count -= blocks;
    }
#endif
    return count == 0 ? crc : (uint32_t)zlib_crc32(crc, at, (unsigned int)count);
}

typedef struct Chunk {
    struct Chunk *next;
    size_t size, used;
    unsigned char bytes[];
} Chunk;

typedef struct {
    long long lsn, entries;
    double sync_s;
} DurableBatch;

typedef struct {
    PyObject_HEAD
    /* what never changes */
    PyObject *node_id;
    unsigned char node_hash[NODE_HASH_BYTES];
    long long payload_bytes_max, queue_max_entries, queue_max_bytes, batch_max_entries, batch_max_bytes;
    double batch_timeout_s;
    int durable_fd, shipper_fd;

    pthread_mutex_t lock; /* guards what follows up to the writer's */
    pthread_cond_t changed;
    Chunk *head, *tail, *free;
    size_t head_at; /* where the first record of the next batch stands in the head */
    int free_chunks;
    long long queued, bytes; /* records that no batch has taken; bytes of all that is not durable */
    long long next_lsn, written_lsn, durable_lsn;
    long long last_physical, last_logical;
    long long wanted; /* how many queued records the writer sleeps for; 0 when it is awake */
    int is_refusing, is_closing;
    int is_held_open; /* the next batch waits for so many, from this time on */
    long long held_entries;
    double held_at_s;
    double half_at_s; /* from when on half of them are enough */
    DurableBatch durable[DURABLE_BATCHES_MAX];
    size_t durable_first, durable_count;

    /* the writer's */
    struct iovec pieces[PIECES_MAX];

    /* the shipper's: the batch that was read last, to be sent */
    unsigned char *shipped;
    size_t shipped_size, shipped_bytes;
} Queue;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void seal(unsigned char *record, size_t length)
{
    put_u32(record, crc32_on(0, record + LENGTH_AT, length - LENGTH_AT));
}

/* --- appending: with the interpreter's lock ----------------------------------------------------------------------- */

typedef struct {
    long long physical, logical, type;
    Text payload;
} Record;

enum { IS_SOUND, IS_REFUSED, IS_RAISED };

/* A record that may follow one of this HLC. */
static int record_of(const Queue *queue, PyObject *hlc, PyObject *type, PyObject *payload, long long physical,
                     long long logical, Record *record)
{
    if (!PyTuple_Check(hlc) || PyTuple_GET_SIZE(hlc) != 3 || !PyLong_Check(PyTuple_GET_ITEM(hlc, 0))
        || !PyLong_Check(PyTuple_GET_ITEM(hlc, 1)) || !PyUnicode_Check(PyTuple_GET_ITEM(hlc, 2)) || !PyLong_Check(type)
        || !PyBytes_Check(payload)) {
        PyErr_SetString(PyExc_TypeError, "a record is an HLC, a type and bytes");
        return IS_RAISED;
    }
    if (!number_of(PyTuple_GET_ITEM(hlc, 0), &record->physical)
        || !number_of(PyTuple_GET_ITEM(hlc, 1), &record->logical) || !number_of(type, &record->type))
        return IS_REFUSED;
    record->payload = (Text){PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)};
    PyObject *node = PyTuple_GET_ITEM(hlc, 2);
    if (record->physical < 0 || record->logical < 0 || record->logical > UINT32_MAX || record->type < 1
        || record->type > UINT8_MAX || record->type == BATCH_RECORD_TYPE
        || record->payload.count > queue->payload_bytes_max
        || (node != queue->node_id && PyUnicode_Compare(node, queue->node_id) != 0)
        || record->physical < physical || (record->physical == physical && record->logical <= logical))
        return IS_REFUSED;
    return IS_SOUND;
}

/* Where a record of this length is to stand; NULL when there is no memory. The lock is held. */
static unsigned char *room_for(Queue *queue, size_t length)
{
    Chunk *tail = queue->tail;
    if (tail->size - tail->used < length) {
        Chunk *next = queue->free;
        if (next != NULL && next->size >= length) {
            queue->free = next->next;
            queue->free_chunks--;
        } else {
            const size_t size = length > CHUNK_BYTES ? length : CHUNK_BYTES;
            next = PyMem_RawMalloc(sizeof(Chunk) + size);
            if (next == NULL)
                return NULL;
            next->size = size;
        }
        next->next = NULL;
        next->used = 0;
        tail->next = next;
        queue->tail = tail = next;
    }
    unsigned char *at = tail->bytes + tail->used;
    tail->used += length;
    return at;
}

/* A chunk that holds nothing any more; those of the usual size are used again. The lock is held. */
static void let_go(Queue *queue, Chunk *chunk)
{
    if (chunk->size == CHUNK_BYTES && queue->free_chunks < FREE_CHUNKS_MAX) {
        chunk->next = queue->free;
        queue->free = chunk;
        queue->free_chunks++;
    } else
        PyMem_RawFree(chunk);
}

static int put_record(Queue *queue, long long lsn, const Record *record)
{
    const size_t length = RECORD_HEADER_BYTES + (size_t)record->payload.count;
    unsigned char *at = room_for(queue, length);
    if (at == NULL)
        return 0;
    at = put_u64(put_u32(at + LENGTH_AT, (uint32_t)length), (uint64_t)lsn);
    at = put_u32(put_u64(at, (uint64_t)record->physical), (uint32_t)record->logical);
    at = put(at, queue->node_hash, NODE_HASH_BYTES);
    *at++ = 0; /* PENDING */
    *at++ = (unsigned char)record->type;
    put(at, record->payload.bytes, (size_t)record->payload.count);
    return 1;
}

/* Whether so much more fits the bounds, and may come at all; then there is a place for it. The lock is held. */
static int may_come(Queue *queue, long long entries, long long bytes)
{
    if (queue->is_refusing || queue->next_lsn - 1 - queue->durable_lsn + entries > queue->queue_max_entries
        || queue->bytes + bytes > queue->queue_max_bytes)
        return 0;
    if (queue->bytes == 0) { /* the writer has nothing in hand: begin anew, in memory that the cache still has */
        queue->head_at = 0;
        queue->tail->used = 0;
    }
    return 1;
}

/* Records that were framed are queued; whether the writer is to be woken. The lock is held. */
static int have_come(Queue *queue, long long entries, long long bytes, const Record *last)
{
    queue->next_lsn += entries;
    queue->queued += entries;
    queue->bytes += bytes;
    queue->last_physical = last->physical;
    queue->last_logical = last->logical;
    if (queue->wanted == 0 || (queue->queued < queue->wanted && queue->bytes < queue->batch_max_bytes))
        return 0;
    queue->wanted = 0;
    return 1;
}

/* All records one behind the other, or none of them. The lock is held. */
static int put_all(Queue *queue, const Record *records, Py_ssize_t count)
{
    Chunk *const tail = queue->tail;
    const size_t used = tail->used;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (put_record(queue, queue->next_lsn + i, &records[i]))
            continue;
        for (Chunk *chunk = tail->next, *next; chunk != NULL; chunk = next) {
            next = chunk->next;
            let_go(queue, chunk);
        }
        tail->next = NULL;
        tail->used = used;
        queue->tail = tail;
        return 0;
    }
    return 1;
}

/* Queue checked records one behind the other, all or none; lsn becomes that of the first. */
static int enqueue(Queue *queue, const Record *records, Py_ssize_t count, long long bytes, long long *lsn)
{
    int found = IS_SOUND, is_woken = 0;
    pthread_mutex_lock(&queue->lock);
    *lsn = queue->next_lsn;
    if (!may_come(queue, count, bytes))
        found = IS_REFUSED;
    else if (!put_all(queue, records, count))
        found = IS_RAISED;
    else if (count > 0)
        is_woken = have_come(queue, count, bytes, &records[count - 1]);
    pthread_mutex_unlock(&queue->lock);
    if (is_woken)
        pthread_cond_signal(&queue->changed);
    if (found == IS_RAISED)
        PyErr_NoMemory();
    return found;
}

/* append(hlc, type, payload): as wal.queue.Queue.append. */
static PyObject *append(Queue *queue, PyObject *const *args, Py_ssize_t count)
{
    Record record;
    long long lsn = 0;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "append takes an HLC, a type and a payload");
        return NULL;
    }
    /* The last HLC changes only with the interpreter's lock. */
    int found = record_of(queue, args[0], args[1], args[2], queue->last_physical, queue->last_logical, &record);
    if (found == IS_SOUND)
        found = enqueue(queue, &record, 1, RECORD_HEADER_BYTES + record.payload.count, &lsn);
    return answer_of(PyLong_FromLongLong(lsn), found == IS_SOUND);
}

/* append_all(records): as wal.queue.Queue.append_all. */
static PyObject *append_all(Queue *queue, PyObject *values)
{
    PyObject *kept = PySequence_Fast(values, "records are a sequence");
    if (kept == NULL)
        return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(kept);
    Record *records = PyMem_Malloc((size_t)(count + 1) * sizeof(Record));
    int found = IS_SOUND;
    long long bytes = 0, physical = queue->last_physical, logical = queue->last_logical, lsn = 0;
    if (records == NULL) {
        PyErr_NoMemory();
        found = IS_RAISED;
    }
    for (Py_ssize_t i = 0; i < count && found == IS_SOUND; i++) {
        PyObject *value = PySequence_Fast_GET_ITEM(kept, i);
        if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3) {
            PyErr_SetString(PyExc_TypeError, "a record is an HLC, a type and bytes");
            found = IS_RAISED;
            break;
        }
        found = record_of(queue, PyTuple_GET_ITEM(value, 0), PyTuple_GET_ITEM(value, 1), PyTuple_GET_ITEM(value, 2),
                          physical, logical, &records[i]);
        if (found != IS_SOUND)
            break;
        physical = records[i].physical;
        logical = records[i].logical;
        bytes += RECORD_HEADER_BYTES + records[i].payload.count;
    }
    if (found == IS_SOUND)
        found = enqueue(queue, records, count, bytes, &lsn);
    PyMem_Free(records);
    Py_DECREF(kept);
    return answer_of(PyLong_FromLongLong(lsn), found == IS_SOUND);
}

/* --- the file: without the interpreter's lock --------------------------------------------------------------------- */

/* All pieces one after the other: one system call, more when it falls short. 0, or what errno was. */
static int write_pieces(int file, const struct iovec *pieces, int count, off_t offset)
{
    ssize_t done;
    do
        done = pwritev(file, pieces, count, offset);
    while (done < 0 && errno == EINTR);
    if (done < 0)
        return errno;
    size_t written = (size_t)done;
    for (int i = 0; i < count; i++) {
        size_t of_piece = written < pieces[i].iov_len ? written : pieces[i].iov_len;
        written -= of_piece;
        while (of_piece < pieces[i].iov_len) {
            const ssize_t step = pwrite(file, (const char *)pieces[i].iov_base + of_piece, pieces[i].iov_len - of_piece,
                                        offset + (off_t)of_piece);
            if (step > 0)
                of_piece += (size_t)step;
            else if (step == 0)
                return EIO;
            else if (errno != EINTR)
                return errno;
        }
        offset += (off_t)of_piece;
    }
    return 0;
}

static int wake(int fd)
{
    const uint64_t one = 1;
    while (fd >= 0 && write(fd, &one, sizeof one) < 0)
        if (errno == EAGAIN)
            return 0; /* a wake-up is pending already */
        else if (errno != EINTR)
            return errno;
    return 0;
}

/* --- the writer's loop: without the interpreter's lock ------------------------------------------------------------ */

/* Sleep until so many are queued, or to be woken, or for that long. The lock is held, but while it sleeps. */
static void sleep_for(Queue *queue, long long records, double until_s)
{
    struct timespec until = {.tv_sec = (time_t)until_s};
    until.tv_nsec = (long)((until_s - (double)until.tv_sec) * 1e9);
    queue->wanted = records;
    pthread_cond_timedwait(&queue->changed, &queue->lock, &until);
    queue->wanted = 0;
}

/* Sleep until a record is queued, or the queue closes; 0 when time was up before. The lock is held. */
static int await_record(Queue *queue, double until_s)
{
    while (!queue->is_closing && queue->queued == 0) {
        if (seconds() >= until_s)
            return 0;
        sleep_for(queue, 1, until_s);
    }
    return 1;
}

/* So many are about to come back: the next batch is held open for them, but where many have come; half are enough after
 * that long. The lock is held. */
static void hold_open(Queue *queue, long long entries, double half_after_s)
{
    if (entries > queue->batch_max_entries)
        entries = queue->batch_max_entries;
    queue->is_held_open = entries >= LINGER_ENTRIES_MIN && queue->queued * LINGER_PART < entries;
    queue->held_entries = entries;
    queue->held_at_s = seconds();
    queue->half_at_s = (entries + 1) / 2 >= HALF_MIN ? queue->held_at_s + half_after_s : INFINITY;
}

/* Sleep while the next batch is held open; 0 when it still is at this time. The lock is held. */
static int await_company(Queue *queue, double until_s)
{
    while (queue->is_held_open && !queue->is_closing && queue->queued < queue->held_entries
           && queue->bytes < queue->batch_max_bytes) {
        const long long entries = queue->held_entries;
        const double held_until_s = queue->held_at_s + queue->batch_timeout_s, now_s = seconds();
        const long long half = queue->half_at_s < held_until_s ? (entries + 1) / 2 : entries;
        const int is_half = queue->queued >= half;
        const double wake_at_s = is_half ? queue->half_at_s : held_until_s;
        if (now_s >= wake_at_s)
            break;
        if (now_s >= until_s)
            return 0; /* the folder comes first */
        sleep_for(queue, is_half ? entries : half, wake_at_s < until_s ? wake_at_s : until_s);
    }
    queue->is_held_open = 0;
    return 1;
}

/* A batch: its records, and where they end. */
typedef struct {
    long long entries, bytes;
    Chunk *end;
    size_t end_at;
    unsigned char hlc[HLC_BYTES]; /* of the last record */
    uint32_t crc;
    int pieces;
} Taken;

/* The most records from the head on that may be one batch, of a queue that holds more. Reads what is framed already,
 * which nobody changes, so the lock need not be held. */
static void shorten(const Queue *queue, Taken *taken)
{
    const Chunk *const last = taken->end;
    const size_t last_at = taken->end_at;
    long long entries = 0, bytes = 0;
    Chunk *chunk = queue->head;
    for (size_t at = queue->head_at;;) {
        if (at == (chunk == last ? last_at : chunk->used)) {
            if (chunk == last)
                break;
            chunk = chunk->next;
            at = 0;
            continue;
        }
        const uint32_t length = u32_at(chunk->bytes + at + LENGTH_AT);
        if (entries == queue->batch_max_entries || (entries > 0 && bytes + length > queue->batch_max_bytes))
            break;
        at += length;
        bytes += length;
        entries++;
        taken->end = chunk;
        taken->end_at = at;
    }
    taken->entries = entries;
    taken->bytes = bytes;
}

/* Sum each record and all of them, and say where they lie. */
static void sum(Queue *queue, Taken *taken)
{
    unsigned char *last = NULL;
    uint32_t crc = 0;
    Chunk *chunk = queue->head;
    size_t from = queue->head_at;
    taken->pieces = 1; /* the first is that of the BATCH record */
    for (;; chunk = chunk->next, from = 0) {
        const size_t end = chunk == taken->end ? taken->end_at : chunk->used;
        for (size_t at = from; at < end; at += u32_at(last + LENGTH_AT)) {
            last = chunk->bytes + at;
            seal(last, u32_at(last + LENGTH_AT));
        }
        if (end > from) {
            queue->pieces[taken->pieces++] = (struct iovec){chunk->bytes + from, end - from};
            crc = crc32_on(crc, chunk->bytes + from, end - from);
        }
        if (chunk == taken->end)
            break;
    }
    taken->crc = crc;
    memcpy(taken->hlc, last + HLC_AT, HLC_BYTES);
}

typedef struct {
    int file;
    long long offset, end, small_end, small;
    PyObject *path; /* kept by the caller's arguments */
    unsigned long long inode;
    double until_s;
    long long size; /* of the batch that has no room */
    int is_named, is_open;
} Segment;

/* Write and sync a batch, and see that the file has its name. 0, or what errno was. */
static int commit(Queue *queue, Segment *segment, Taken *taken, double *sync_s)
{
    unsigned char opening[BATCH_RECORD_BYTES];
    const uint64_t first_lsn = (uint64_t)queue->written_lsn + 1, last_lsn = first_lsn + (uint64_t)taken->entries - 1;
    sum(queue, taken);
    unsigned char *at = put_u64(put_u32(opening + LENGTH_AT, BATCH_RECORD_BYTES), first_lsn);
    at = put(at, taken->hlc, HLC_BYTES);
    *at++ = 0; /* PENDING */
    *at++ = BATCH_RECORD_TYPE;
    put_u32(put_u32(put_u64(put_u64(at, first_lsn), last_lsn), (uint32_t)taken->bytes), taken->crc);
    seal(opening, sizeof opening);
    queue->pieces[0] = (struct iovec){opening, sizeof opening};

    const int failed = write_pieces(segment->file, queue->pieces, taken->pieces, segment->offset);
    if (failed != 0)
        return failed;
    segment->offset += BATCH_RECORD_BYTES + taken->bytes;
    __atomic_store_n(&queue->written_lsn, (long long)last_lsn, __ATOMIC_RELEASE);
    const int failed_wake = wake(queue->shipper_fd);
    if (failed_wake != 0)
        return failed_wake;
    const double began_s = seconds();
    while (fdatasync(segment->file) != 0)
        if (errno != EINTR)
            return errno;
    *sync_s = seconds() - began_s;
    struct stat found;
    segment->is_named = stat(PyBytes_AS_STRING(segment->path), &found) == 0 && found.st_ino == segment->inode;
    return 0;
}

/* What was synced is durable: wake those that wait for it. 0, or what errno was. */
static int announce(Queue *queue, const Taken *taken, double sync_s)
{
    pthread_mutex_lock(&queue->lock);
    __atomic_store_n(&queue->durable_lsn, queue->written_lsn, __ATOMIC_RELEASE);
    queue->bytes -= taken->bytes;
    while (queue->head != taken->end) {
        Chunk *const done = queue->head;
        queue->head = done->next;
        let_go(queue, done);
    }
    queue->head_at = taken->end_at;
    hold_open(queue, taken->entries, sync_s / HALF_AFTER);
    if (queue->durable_count == DURABLE_BATCHES_MAX) {
        queue->durable_first = (queue->durable_first + 1) % DURABLE_BATCHES_MAX;
        queue->durable_count--;
    }
    queue->durable[(queue->durable_first + queue->durable_count++) % DURABLE_BATCHES_MAX]
        = (DurableBatch){queue->durable_lsn, taken->entries, sync_s};
    pthread_mutex_unlock(&queue->lock);
    const int failed = wake(queue->durable_fd);
    return failed != 0 ? failed : wake(queue->shipper_fd);
}

/* A batch of this size was synced: zeros for one like it, as wal.log.Log.prepare; where the disk has no room for them,
 * Python will see to it. 0, or what errno was. */
static int prepare(Segment *segment, long long size)
{
    static char zeros[AHEAD_BYTES]; /* never written to */
    const long long offset = segment->offset, start = segment->small_end > offset ? segment->small_end : offset;
    long long end = offset + (offset < AHEAD_BYTES ? offset : AHEAD_BYTES);
    if (end > segment->end)
        end = segment->end;
    if (size > segment->small || offset < AHEAD_FROM_BYTES || offset + AHEAD_BATCHES * size <= segment->small_end
        || start >= end)
        return 0;
    const ssize_t count = pwrite(segment->file, zeros, (size_t)(end - start), start);
    if (count > 0)
        segment->small_end = start + count;
    return count >= 0 || errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EINTR ? 0 : errno;
}

/* Batch after batch, until Python is needed. 0, or what errno was. */
static int write_on(Queue *queue, Segment *segment)
{
    for (;;) {
        Taken taken;
        double sync_s = 0;
        pthread_mutex_lock(&queue->lock);
        do
            if (!await_company(queue, segment->until_s) || !await_record(queue, segment->until_s)) {
                pthread_mutex_unlock(&queue->lock);
                return 0;
            }
        while (queue->is_held_open && !queue->is_closing); /* since one came, others were said to come */
        taken = (Taken){.entries = queue->queued, .bytes = queue->bytes, .end = queue->tail,
                        .end_at = queue->tail->used};
        if (taken.entries == 0) { /* it is closing */
            segment->is_open = 0;
            pthread_mutex_unlock(&queue->lock);
            return 0;
        }
        if (taken.entries > queue->batch_max_entries || taken.bytes > queue->batch_max_bytes) {
            pthread_mutex_unlock(&queue->lock);
            shorten(queue, &taken);
            pthread_mutex_lock(&queue->lock);
        }
        const long long size = BATCH_RECORD_BYTES + taken.bytes;
        if (segment->offset + size > (size > segment->small ? segment->end : segment->small_end)) {
            segment->size = size;
            pthread_mutex_unlock(&queue->lock);
            return 0;
        }
        queue->queued -= taken.entries;
        pthread_mutex_unlock(&queue->lock);
        int failed = commit(queue, segment, &taken, &sync_s);
        if (failed == 0 && segment->is_named)
            failed = announce(queue, &taken, sync_s);
        if (failed == 0 && segment->is_named)
            failed = prepare(segment, size); /* while the next batch comes */
        if (failed != 0 || !segment->is_named || seconds() >= segment->until_s)
            return failed;
    }
}

/* write_batches(descriptor, offset, path, inode, end, small_end, small_bytes, until_s): write batches into a
 * segment, as wal.log.AppendSpace says, until Python is needed: at a time, for a batch without space, or at the end.
 * Each that was taken is on the disk then: (the offset behind the last batch, the end of the space that was written
 * ahead, bytes that the next batch wants or 0, whether the path still is of this inode, whether more may come).
 * Other threads run meanwhile. */
static PyObject *write_batches(Queue *queue, PyObject *args)
{
    Segment segment = {.is_named = 1, .is_open = 1};
    int failed;
    if (!PyArg_ParseTuple(args, "iLSKLLLd", &segment.file, &segment.offset, &segment.path, &segment.inode, &segment.end,
                          &segment.small_end, &segment.small, &segment.until_s))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = write_on(queue, &segment);
    Py_END_ALLOW_THREADS
    if (failed != 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("(LLLOO)", segment.offset, segment.small_end, segment.size, segment.is_named ? Py_True : Py_False, segment.is_open ? Py_True : Py_False);
}

/* --- the rest: with the interpreter's lock ------------------------------------------------------------------------ */

/* take_durable(): as wal.queue.Queue.take_durable. */
static PyObject *take_durable(Queue *queue, PyObject *Py_UNUSED(ignored))
{
    pthread_mutex_lock(&queue->lock);
    const size_t count = queue->durable_count;
    DurableBatch *batches = PyMem_RawMalloc((count + 1) * sizeof(DurableBatch));
    for (size_t i = 0; i < count && batches != NULL; i++)
        batches[i] = queue->durable[(queue->durable_first + i) % DURABLE_BATCHES_MAX];
    if (batches != NULL)
        queue->durable_count = 0;
    pthread_mutex_unlock(&queue->lock);
    if (batches == NULL)
        return PyErr_NoMemory();
    PyObject *found = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; i < count && found != NULL; i++)
        if (!set_item(found, (Py_ssize_t)i, Py_BuildValue("(LdL)", batches[i].lsn, batches[i].sync_s, batches[i].entries)))
            Py_CLEAR(found);
    PyMem_RawFree(batches);
    return found;
}

/* state(): as wal.queue.Queue.state. */
static PyObject *state(Queue *queue, PyObject *Py_UNUSED(ignored))
{
    pthread_mutex_lock(&queue->lock);
    const long long next = queue->next_lsn, durable = queue->durable_lsn, bytes = queue->bytes;
    const long long physical = queue->last_physical, logical = queue->last_logical;
    pthread_mutex_unlock(&queue->lock);
    return Py_BuildValue("(LLLLL)", next, durable, bytes, physical, logical);
}

/* close(): as wal.queue.Queue.close. */
static PyObject *close_queue(Queue *queue, PyObject *Py_UNUSED(ignored))
{
    pthread_mutex_lock(&queue->lock);
    queue->is_refusing = queue->is_closing = 1;
    queue->wanted = 0;
    pthread_mutex_unlock(&queue->lock);
    pthread_cond_signal(&queue->changed);
    Py_RETURN_NONE;
}

/* expect(entries): as wal.queue.Queue.expect. */
static PyObject *expect(Queue *queue, PyObject *value)
{
    const long long entries = PyLong_AsLongLong(value);
    if (entries == -1 && PyErr_Occurred())
        return NULL;
    if (entries < LINGER_ENTRIES_MIN)
        Py_RETURN_NONE;
    pthread_mutex_lock(&queue->lock);
    hold_open(queue, entries, INFINITY);
    pthread_mutex_unlock(&queue->lock);
    Py_RETURN_NONE;
}

static PyObject *lsn_of(Queue *queue, void *offset)
{
    return PyLong_FromLongLong(__atomic_load_n((long long *)((char *)queue + (size_t)offset), __ATOMIC_ACQUIRE));
}

static void free_chunks(Chunk *chunk)
{
    while (chunk != NULL) {
        Chunk *const next = chunk->next;
        PyMem_RawFree(chunk);
        chunk = next;
    }
}

static void queue_dealloc(Queue *queue)
{
    PyTypeObject *type = Py_TYPE(queue);
    if (queue->node_id != NULL) { /* it was made */
        free_chunks(queue->head);
        free_chunks(queue->free);
        PyMem_RawFree(queue->shipped);
        /* Lock and condition hold nothing, and are not destroyed: in a child of the process that would wait for the thread
         * of the writer, which sleeps in the parent. */
        Py_DECREF(queue->node_id);
    }
    type->tp_free((PyObject *)queue);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *node_id;
    const char *node_hash;
    Py_ssize_t node_hash_bytes;
    Queue *queue = (Queue *)type->tp_alloc(type, 0);
    if (queue == NULL)
        return NULL;
    if (!PyArg_ParseTuple(args, "Uy#LLLLLLdii", &node_id, &node_hash, &node_hash_bytes, &queue->next_lsn,
                          &queue->payload_bytes_max, &queue->queue_max_entries, &queue->queue_max_bytes,
                          &queue->batch_max_entries, &queue->batch_max_bytes, &queue->batch_timeout_s, &queue->durable_fd,
                          &queue->shipper_fd)) {
        Py_DECREF(queue);
        return NULL;
    }
    queue->head = queue->tail = PyMem_RawCalloc(1, sizeof(Chunk) + CHUNK_BYTES);
    if (queue->head == NULL || node_hash_bytes != NODE_HASH_BYTES || queue->batch_max_bytes > BATCH_BODY_BYTES_MAX) {
        PyMem_RawFree(queue->head);
        Py_DECREF(queue);
        PyErr_SetString(PyExc_ValueError, "no memory, a hash of another length, or batches that are too large");
        return NULL;
    }
    queue->head->size = CHUNK_BYTES;
    memcpy(queue->node_hash, node_hash, NODE_HASH_BYTES);
    queue->written_lsn = queue->durable_lsn = queue->next_lsn - 1;
    queue->last_physical = queue->last_logical = -1;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->changed, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&queue->lock, NULL);
    queue->node_id = Py_NewRef(node_id);
    return (PyObject *)queue;
}

/* --- batches from elsewhere: without the interpreter's lock -------------------------------------------------------- */

static int is_summed(const unsigned char *record, size_t length)
{
    return u32_at(record) == crc32_on(0, record + LENGTH_AT, length - LENGTH_AT);
}

/* The records of a batch from first to last, which fill the body; where the last begins, NULL when they are not sound. */
static const unsigned char *last_of(const unsigned char *at, size_t bytes, uint64_t first, uint64_t last,
                                    const unsigned char *node_hash)
{
    const unsigned char *found = NULL;
    for (uint64_t lsn = first; lsn <= last; lsn++) {
        if (bytes < RECORD_HEADER_BYTES)
            return NULL;
        const size_t length = u32_at(at + LENGTH_AT);
        if (length < RECORD_HEADER_BYTES || length > RECORD_BYTES_MAX || length > bytes || u64_at(at + LSN_AT) != lsn
            || at[STATE_AT] != 0 || at[TYPE_AT] == BATCH_RECORD_TYPE
            || memcmp(at + HLC_AT + HLC_BYTES - NODE_HASH_BYTES, node_hash, NODE_HASH_BYTES) != 0
            || !is_summed(at, length))
            return NULL;
        found = at;
        at += length;
        bytes -= length;
    }
    return bytes == 0 ? found : NULL;
}

/* The last LSN of these batches, which begin with lsn; 0 when they are not all sound. */
static uint64_t last_lsn_of(const unsigned char *at, size_t bytes, uint64_t lsn, const unsigned char *node_hash)
{
    while (bytes > 0) {
        if (bytes < BATCH_RECORD_BYTES || u32_at(at + LENGTH_AT) != BATCH_RECORD_BYTES || u64_at(at + LSN_AT) != lsn
            || at[STATE_AT] != 0 || at[TYPE_AT] != BATCH_RECORD_TYPE || !is_summed(at, BATCH_RECORD_BYTES))
            return 0;
        const unsigned char *announced = at + RECORD_HEADER_BYTES, *body = at + BATCH_RECORD_BYTES;
        const uint64_t first = u64_at(announced), last = u64_at(announced + 8);
        const size_t body_bytes = u32_at(announced + 16);
        if (first != lsn || last < first || last > INT64_MAX || body_bytes > BATCH_BODY_BYTES_MAX
            || body_bytes > bytes - BATCH_RECORD_BYTES || last - first >= body_bytes / RECORD_HEADER_BYTES
            || u32_at(announced + 20) != crc32_on(0, body, body_bytes))
            return 0;
        const unsigned char *found = last_of(body, body_bytes, first, last, node_hash);
        if (found == NULL || memcmp(found + HLC_AT, at + HLC_AT, HLC_BYTES) != 0)
            return 0;
        lsn = last + 1;
        at = body + body_bytes;
        bytes -= BATCH_RECORD_BYTES + body_bytes;
    }
    return lsn - 1;
}

/* check_batches(data, first_lsn, node_hash): the last LSN of the batches that data is; None where its twin must be
 * asked. Other threads run meanwhile. */
static PyObject *check_batches(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    long long first_lsn;
    const char *node_hash;
    Py_ssize_t node_hash_bytes;
    uint64_t last_lsn = 0;
    if (!PyArg_ParseTuple(args, "y*Ly#", &data, &first_lsn, &node_hash, &node_hash_bytes))
        return NULL;
    if (first_lsn > 0 && node_hash_bytes == NODE_HASH_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        last_lsn = last_lsn_of(data.buf, (size_t)data.len, (uint64_t)first_lsn, (const unsigned char *)node_hash);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return answer_of(PyLong_FromUnsignedLongLong(last_lsn), last_lsn > 0);
}

/* Wait until the socket has something to read: 0, or IS_LATE, or minus errno. */
static int await_bytes(int socket, double timeout_s)
{
    struct pollfd waited = {.fd = socket, .events = POLLIN};
    const double until_s = seconds() + timeout_s;
    for (;;) {
        const double left_s = until_s - seconds();
        const int found = poll(&waited, 1, left_s <= 0 ? 0 : (int)(left_s * 1e3) + 1);
        if (found > 0)
            return 0;
        if (found == 0 && left_s <= 0)
            return IS_LATE;
        if (found < 0 && errno != EINTR)
            return -errno;
    }
}

/* --- the module --------------------------------------------------------------------------------------------------- */

#include "_stream.h"
#include "_shipping.h"

static PyMethodDef queue_methods[] = {
    METHOD(append, append, METH_FASTCALL),
    METHOD(append_all, append_all, METH_O),
    METHOD(write_batches, write_batches, METH_VARARGS),
    METHOD(take_durable, take_durable, METH_NOARGS),
    METHOD(state, state, METH_NOARGS),
    METHOD(expect, expect, METH_O),
    METHOD(close, close_queue, METH_NOARGS),
    METHOD(ship, ship, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef queue_values[] = {
    {"next_lsn", (getter)lsn_of, NULL, NULL, (void *)offsetof(Queue, next_lsn)},
    {"written_lsn", (getter)lsn_of, NULL, NULL, (void *)offsetof(Queue, written_lsn)},
    {"durable_lsn", (getter)lsn_of, NULL, NULL, (void *)offsetof(Queue, durable_lsn)},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject queue_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "wal._native.Queue",
    .tp_doc = "Records on their way to the disk.",
    .tp_basicsize = sizeof(Queue),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = queue_new,
    .tp_dealloc = (destructor)queue_dealloc,
    .tp_methods = queue_methods,
    .tp_getset = queue_values,
};

static PyMethodDef functions[] = {
    METHOD(check_batches, check_batches, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "wal._native",
    .m_doc = "The queue of the WAL, and checking batches, in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static const char *const zlib[] = {"libz.so.1", NULL};
    *(void **)&zlib_crc32 = symbol_of(zlib, "crc32");
#ifdef FOLDS
    folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
    if (zlib_crc32 == NULL || PyType_Ready(&queue_type) < 0 || PyType_Ready(&stream_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL
        && (PyModule_AddObjectRef(module, "Queue", (PyObject *)&queue_type) < 0
            || PyModule_AddObjectRef(module, "Stream", (PyObject *)&stream_type) < 0))
        Py_CLEAR(module);
    return module;
}
