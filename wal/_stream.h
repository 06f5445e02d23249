/*
 * A stream of Appends that one connection brings for one log of a safekeeper: received, checked, written, synced and
 * acknowledged, one behind the other, without the interpreter's lock. Part of wal/_native.c.
 *
 * Python lends the log to the stream once it has accepted an Append by the rules (wal.replication.acceptor), and takes
 * it back before it does or asks anything else of it. Meanwhile nothing of what those rules look at changes but where
 * the log ends. So the stream takes one kind of message alone: an Append of the same epoch whose one batch goes
 * on where the log ends, is sound, and has space in the segment. Whatever else comes stays in the buffer and is
 * Python's, who finds the log as if he had done all himself.
 */

#define APPEND_KIND 7
#define ACK_KIND 8
#define FRAME_PREFIX_BYTES 8 /* length and CRC */
#define FRAME_HEAD_AT 13     /* behind the kind and the length of the head */
#define ACK_BYTES_MAX (FRAME_HEAD_AT + 1 + 2 * 9)
#define WAL_ID_BYTES 16
#define NOTE_BYTES (WAL_ID_BYTES + 8 + 4)

typedef struct {
    int is_lent, failed, is_named; /* failed: what errno was; is_named: the segment has its name */
    unsigned long long epoch, tail_lsn, committed_lsn, settled_lsn, noted_lsn, inode;
    unsigned char node_hash[NODE_HASH_BYTES], wal_id[WAL_ID_BYTES];
    PyObject *path;
    int file, note;
    long long offset, end, small_end, small;
} Lent;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock; /* guards the log that is lent */
    Lent log;
} Stream;

/* --- MessagePack, as far as an Append and an Ack need it ------------------------------------------------------------ */

/* An unsigned integer; where it ends, NULL when there is none. */
static const unsigned char *take_uint(const unsigned char *at, const unsigned char *end, uint64_t *value)
{
    if (at == NULL || at >= end)
        return NULL;
    const unsigned char first = *at++;
    if (first < 0x80) {
        *value = first;
        return at;
    }
    if (first < 0xcc || first > 0xcf || end - at < 1 << (first - 0xcc))
        return NULL;
    *value = 0;
    for (int left = 1 << (first - 0xcc); left > 0; left--)
        *value = *value << 8 | *at++;
    return at;
}

static unsigned char *put_uint(unsigned char *at, uint64_t value)
{
    const int size = value < 0x80 ? 0 : value <= UINT8_MAX ? 1 : value <= UINT16_MAX ? 2 : value <= UINT32_MAX ? 4 : 8;
    if (size == 0) {
        *at++ = (unsigned char)value;
        return at;
    }
    *at++ = (unsigned char)(size == 1 ? 0xcc : size == 2 ? 0xcd : size == 4 ? 0xce : 0xcf);
    for (int shift = 8 * (size - 1); shift >= 0; shift -= 8)
        *at++ = (unsigned char)(value >> shift);
    return at;
}

static const unsigned char *take_array(const unsigned char *at, const unsigned char *end, int count)
{
    return at != NULL && at < end && *at == (0x90 | count) ? at + 1 : NULL;
}

/* Fill in kind, lengths and CRC of a frame whose head is so long; behind it comes this batch. */
static void seal_frame(unsigned char *head, size_t head_bytes, unsigned char kind, const unsigned char *batch, size_t size)
{
    head[FRAME_PREFIX_BYTES] = kind;
    put_u32(head + FRAME_PREFIX_BYTES + 1, (uint32_t)(head_bytes - FRAME_HEAD_AT));
    put_u32(head, (uint32_t)(head_bytes - LENGTH_AT + size));
    const uint32_t crc = crc32_on(0, head + FRAME_PREFIX_BYTES, head_bytes - FRAME_PREFIX_BYTES);
    put_u32(head + LENGTH_AT, crc32_on(crc, batch, size));
}

/* Whether a whole frame has this kind, a head that fits it, and its CRC; the end of the head. */
static const unsigned char *head_end_of(const unsigned char *frame, size_t whole, unsigned char kind)
{
    if (whole < FRAME_HEAD_AT || frame[FRAME_PREFIX_BYTES] != kind)
        return NULL;
    const size_t head = u32_at(frame + FRAME_PREFIX_BYTES + 1);
    return head <= whole - FRAME_HEAD_AT
            && u32_at(frame + LENGTH_AT) == crc32_on(0, frame + FRAME_PREFIX_BYTES, whole - FRAME_PREFIX_BYTES)
        ? frame + FRAME_HEAD_AT + head : NULL;
}

/* --- what is taken -------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t epoch, previous_epoch, previous_lsn, written_in, committed_lsn, settled_lsn, last_lsn;
    const unsigned char *batch;
    size_t size; /* of the batch, with its BATCH record */
} Appended;

/* Whether the frame is an Append with one batch, all of it sound; what it says. */
static int appended_of(const unsigned char *frame, size_t whole, const unsigned char *node_hash, Appended *found)
{
    const unsigned char *at = frame + FRAME_HEAD_AT, *const end = head_end_of(frame, whole, APPEND_KIND);
    if (end == NULL)
        return 0;
    at = take_uint(take_array(at, end, 5), end, &found->epoch);
    at = take_uint(take_array(at, end, 2), end, &found->previous_epoch);
    at = take_uint(at, end, &found->previous_lsn);
    at = take_uint(at, end, &found->written_in);
    at = take_uint(at, end, &found->committed_lsn);
    at = take_uint(at, end, &found->settled_lsn);
    found->batch = end;
    found->size = (size_t)(frame + whole - end);
    if (at != end || found->committed_lsn > INT64_MAX || found->settled_lsn > INT64_MAX
        || found->previous_lsn >= INT64_MAX || found->size < BATCH_RECORD_BYTES
        || u32_at(end + RECORD_HEADER_BYTES + 16) != found->size - BATCH_RECORD_BYTES)
        return 0;
    found->last_lsn = last_lsn_of(end, found->size, found->previous_lsn + 1, node_hash);
    return found->last_lsn != 0;
}

/* Let the note beside the log say how far it is committed, as wal.replication.kept_logs has it. 0, or errno. */
static int note_committed(Lent *log)
{
    unsigned char note[NOTE_BYTES];
    if (log->committed_lsn <= log->noted_lsn)
        return 0;
    unsigned char *at = put_u64(put(note, log->wal_id, WAL_ID_BYTES), log->committed_lsn);
    put_u32(at, crc32_on(0, note, WAL_ID_BYTES + 8));
    const struct iovec piece = {note, sizeof note};
    const int failed = write_pieces(log->note, &piece, 1, 0);
    if (failed == 0)
        log->noted_lsn = log->committed_lsn;
    return failed;
}

/* Write and sync a batch. 0, or what errno was. The lock is held. */
static int keep(Lent *log, const Appended *append)
{
    const struct iovec piece = {(void *)append->batch, append->size};
    const int failed = write_pieces(log->file, &piece, 1, (off_t)log->offset);
    if (failed != 0)
        return failed;
    while (fdatasync(log->file) != 0)
        if (errno != EINTR)
            return errno;
    struct stat found;
    log->is_named = stat(PyBytes_AS_STRING(log->path), &found) == 0 && found.st_ino == log->inode;
    if (!log->is_named)
        return 0;
    log->offset += (long long)append->size;
    log->tail_lsn = append->last_lsn;
    const uint64_t committed = append->committed_lsn < log->tail_lsn ? append->committed_lsn : log->tail_lsn;
    if (committed > log->committed_lsn)
        log->committed_lsn = committed;
    const uint64_t settled = append->settled_lsn < log->committed_lsn ? append->settled_lsn : log->committed_lsn;
    if (settled > log->settled_lsn)
        log->settled_lsn = settled;
    return note_committed(log);
}

/* Take a frame; 0 when it is Python's, and nothing was done. What it is answered is to be sent then. */
static int take_frame(Stream *stream, const unsigned char *frame, size_t whole, unsigned char *ack, size_t *ack_bytes)
{
    Appended append;
    if (!appended_of(frame, whole, stream->log.node_hash, &append))
        return 0;
    Lent *const log = &stream->log;
    pthread_mutex_lock(&stream->lock);
    const long long end = (long long)append.size > log->small ? log->end : log->small_end;
    int is_taken = log->is_lent && log->failed == 0 && log->is_named && append.epoch == log->epoch
        && append.previous_epoch == log->epoch && append.written_in == log->epoch
        && append.previous_lsn == log->tail_lsn && log->offset + (long long)append.size <= end;
    if (is_taken) {
        log->failed = keep(log, &append);
        is_taken = log->failed == 0 && log->is_named;
    }
    pthread_mutex_unlock(&stream->lock);
    if (!is_taken)
        return 0;
    unsigned char *at = ack + FRAME_HEAD_AT;
    *at++ = 0x92;
    at = put_uint(put_uint(at, append.epoch), append.last_lsn);
    *ack_bytes = (size_t)(at - ack);
    seal_frame(ack, *ack_bytes, ACK_KIND, NULL, 0);
    return 1;
}

/* serve(socket, buffer, idle_s, frame_s): take Appends while they come one behind the other: each is durable, and
 * then acknowledged. Ends with what is Python's: (bytes of it in the buffer, what of an answer is still to be sent,
 * whether time was up). Other threads run meanwhile. */
static PyObject *serve(Stream *stream, PyObject *args)
{
    int socket, ended = 0;
    Py_buffer data;
    double idle_s, frame_s, late_s = 0; /* when the frame that has begun must be whole */
    unsigned char ack[ACK_BYTES_MAX];
    size_t end = 0, ack_bytes = 0, sent = 0;
    if (!PyArg_ParseTuple(args, "iw*dd", &socket, &data, &idle_s, &frame_s))
        return NULL;
    unsigned char *const buffer = data.buf;
    const size_t size = (size_t)data.len;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        ended = await_bytes(socket, end == 0 ? idle_s : late_s - seconds());
        if (ended != 0)
            break;
        const ssize_t count = recv(socket, buffer + end, size - end, MSG_DONTWAIT);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (count <= 0)
            break; /* the next who reads finds out */
        if (end == 0)
            late_s = seconds() + frame_s;
        end += (size_t)count;
        const size_t whole = end < LENGTH_AT ? 0 : LENGTH_AT + (size_t)u32_at(buffer);
        if (end < FRAME_PREFIX_BYTES || (end < whole && whole <= size))
            continue;
        if (end != whole || !take_frame(stream, buffer, whole, ack, &ack_bytes))
            break;
        end = 0;
        const ssize_t done = send(socket, ack, ack_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = done > 0 ? (size_t)done : 0;
        if (sent < ack_bytes)
            break;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return Py_BuildValue("(ny#O)", (Py_ssize_t)end, (const char *)ack + sent, (Py_ssize_t)(ack_bytes - sent),
                         ended == IS_LATE ? Py_True : Py_False);
}

/* --- lending and taking back: with the interpreter's lock ----------------------------------------------------------- */

/* lend(epoch, tail_lsn, committed_lsn, settled_lsn, node_hash, room, noted_lsn, wal_id, note): let the stream go on
 * with a log, all of it durable, that ends so, in this wal.log.AppendSpace; and with the note of what is committed,
 * a descriptor. */
static PyObject *lend(Stream *stream, PyObject *args)
{
    Lent log = {.is_lent = 1, .is_named = 1};
    const char *node_hash, *wal_id;
    Py_ssize_t hash_bytes, id_bytes;
    if (!PyArg_ParseTuple(args, "KKKKy#(iLSKLLL)Ky#i", &log.epoch, &log.tail_lsn, &log.committed_lsn, &log.settled_lsn,
                          &node_hash, &hash_bytes, &log.file, &log.offset, &log.path, &log.inode, &log.end,
                          &log.small_end, &log.small, &log.noted_lsn, &wal_id, &id_bytes, &log.note))
        return NULL;
    if (hash_bytes != NODE_HASH_BYTES || id_bytes != WAL_ID_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a hash or an id of another length");
        return NULL;
    }
    memcpy(log.node_hash, node_hash, NODE_HASH_BYTES);
    memcpy(log.wal_id, wal_id, WAL_ID_BYTES);
    Py_INCREF(log.path);
    pthread_mutex_lock(&stream->lock); /* nobody holds it for long: what is lent was taken back before */
    PyObject *const path = stream->log.path;
    stream->log = log;
    pthread_mutex_unlock(&stream->lock);
    Py_XDECREF(path);
    Py_RETURN_NONE;
}

/* take_back(timeout_s): the stream takes nothing more: (offset behind the last batch, its LSN, LSNs committed,
 * settled and noted, whether the segment has its name). None when a disk holds it up for longer; for ever where the
 * time is below 0. An OSError is what a write or a sync ended with. Other threads run meanwhile. */
static PyObject *take_back(Stream *stream, PyObject *value)
{
    const double timeout_s = PyFloat_AsDouble(value);
    int late;
    if (timeout_s == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (timeout_s < 0)
        late = pthread_mutex_lock(&stream->lock);
    else {
        struct timespec until; /* by the wall clock, as the function has it */
        clock_gettime(CLOCK_REALTIME, &until);
        const double nanoseconds = (double)until.tv_nsec + (timeout_s - (double)(time_t)timeout_s) * 1e9;
        until.tv_sec += (time_t)timeout_s + (nanoseconds >= 1e9);
        until.tv_nsec = (long)(nanoseconds >= 1e9 ? nanoseconds - 1e9 : nanoseconds);
        late = pthread_mutex_timedlock(&stream->lock, &until);
    }
    Py_END_ALLOW_THREADS
    if (late != 0)
        Py_RETURN_NONE;
    stream->log.is_lent = 0;
    const int failed = stream->log.failed;
    const Lent was = stream->log;
    pthread_mutex_unlock(&stream->lock);
    if (failed != 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("(LKKKKO)", was.offset, was.tail_lsn, was.committed_lsn, was.settled_lsn, was.noted_lsn,
                         was.is_named ? Py_True : Py_False);
}

static void stream_dealloc(Stream *stream)
{
    PyTypeObject *type = Py_TYPE(stream);
    Py_XDECREF(stream->log.path);
    type->tp_free((PyObject *)stream);
}

static PyObject *stream_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    Stream *stream = (Stream *)type->tp_alloc(type, 0);
    if (stream != NULL)
        pthread_mutex_init(&stream->lock, NULL);
    return (PyObject *)stream;
}

static PyMethodDef stream_methods[] = {
    METHOD(serve, serve, METH_VARARGS),
    METHOD(lend, lend, METH_VARARGS),
    METHOD(take_back, take_back, METH_O),
    {NULL, NULL, 0, NULL},
};

static PyTypeObject stream_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "wal._native.Stream",
    .tp_doc = "Appends that come over one connection.",
    .tp_basicsize = sizeof(Stream),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = stream_new,
    .tp_dealloc = (destructor)stream_dealloc,
    .tp_methods = stream_methods,
};
