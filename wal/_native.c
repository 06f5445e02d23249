/*
 * A batch of the WAL framed, written and synced without the interpreter's lock (docs/decisions/0037).
 *
 * Its twin in Python, which is the specification, is wal.log.Log.commit. CRC-32 is zlib's, found in the library that
 * Python has loaded for zlib. Without it the module cannot be imported.
 */

#include "../ledger/_native.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define RECORD_HEADER_BYTES 34
#define ANNOUNCED_BYTES 24
#define BATCH_RECORD_TYPE 16
#define CRC_BYTES 4
#define NODE_HASH_BYTES 4

static unsigned long (*zlib_crc32)(unsigned long, const unsigned char *, unsigned int);

/* --- records ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint64_t physical;
    uint32_t logical;
    unsigned char type;
    Text payload;
} Record;

/* 0 when the record is not one of a HLC that fits, a type and a payload in bytes. */
static int record_of(PyObject *value, Record *record)
{
    long long physical, logical, type;
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3)
        return 0;
    PyObject *hlc = PyTuple_GET_ITEM(value, 0);
    if (!PyTuple_Check(hlc) || PyTuple_GET_SIZE(hlc) != 3 || !number_of(PyTuple_GET_ITEM(hlc, 0), &physical)
        || !number_of(PyTuple_GET_ITEM(hlc, 1), &logical) || !number_of(PyTuple_GET_ITEM(value, 1), &type)
        || physical < 0 || logical < 0 || logical > UINT32_MAX || type < 0 || type > UINT8_MAX
        || !bytes_of(PyTuple_GET_ITEM(value, 2), &record->payload))
        return 0;
    record->physical = (uint64_t)physical;
    record->logical = (uint32_t)logical;
    record->type = (unsigned char)type;
    return record->payload.count <= UINT32_MAX - RECORD_HEADER_BYTES;
}

static unsigned char *put_record(unsigned char *at, uint64_t lsn, const unsigned char *node, const Record *record)
{
    const size_t length = RECORD_HEADER_BYTES + (size_t)record->payload.count;
    unsigned char *summed = at + CRC_BYTES;
    unsigned char *end = put_u64(put_u32(summed, (uint32_t)length), lsn);
    end = put(put_u32(put_u64(end, record->physical), record->logical), node, NODE_HASH_BYTES);
    *end++ = 0; /* PENDING */
    *end++ = record->type;
    end = put(end, record->payload.bytes, (size_t)record->payload.count);
    put_u32(at, (uint32_t)zlib_crc32(0, summed, (unsigned int)(end - summed)));
    return end;
}

/* --- the file ----------------------------------------------------------------------------------------------------- */

/* The rest of a piece that was written in part, so many bytes of which are on the disk; 0, or what errno was. */
static int write_rest(int file, struct iovec piece, size_t written, off_t offset)
{
    while (written < piece.iov_len) {
        const ssize_t step = pwrite(file, (const char *)piece.iov_base + written, piece.iov_len - written, offset);
        if (step > 0) {
            written += (size_t)step;
            offset += step;
        } else if (step == 0)
            return EIO;
        else if (errno != EINTR)
            return errno;
    }
    return 0;
}

/* Both pieces, one after the other: one system call, more when it falls short. 0, or what errno was. */
static int write_both(int file, const struct iovec *pieces, off_t offset)
{
    ssize_t written;
    do
        written = pwritev(file, pieces, 2, offset);
    while (written < 0 && errno == EINTR);
    if (written < 0)
        return errno;
    const size_t first = pieces[0].iov_len, done = (size_t)written;
    const int failed = write_rest(file, pieces[0], done < first ? done : first, offset + (off_t)done);
    if (failed != 0)
        return failed;
    const size_t of_second = done < first ? 0 : done - first;
    return write_rest(file, pieces[1], of_second, offset + (off_t)(first + of_second));
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

typedef struct {
    int file;
    off_t offset;
    const char *path;
    uint64_t inode;
    int is_whole; /* the records were in form, and written */
    double sync_s;
    int is_named;
} Segment;

/*
 * Frame, write and sync records; 0, or what errno was. Nothing is written when they are not all in form and together of
 * the length of the body. Runs without the interpreter's lock: what is read are tuples, numbers and bytes that nobody
 * changes and the caller keeps, and no reference is counted. They lie in the cache of the core that queued them, and
 * looking at each costs the more here: time in which that one goes on.
 */
static int commit_batch(Segment *segment, uint64_t first_lsn, const unsigned char *node, PyObject *const *records,
                        Py_ssize_t count, unsigned char *body, size_t body_bytes)
{
    unsigned char opening[RECORD_HEADER_BYTES + ANNOUNCED_BYTES], announced[ANNOUNCED_BYTES], *at = body;
    const uint64_t last_lsn = first_lsn + (uint64_t)count - 1;
    Record record;
    for (Py_ssize_t i = 0; i < count; i++) {
        const size_t left = body_bytes - (size_t)(at - body);
        if (!record_of(records[i], &record) || RECORD_HEADER_BYTES + (size_t)record.payload.count > left)
            return 0;
        at = put_record(at, first_lsn + (uint64_t)i, node, &record);
    }
    segment->is_whole = (size_t)(at - body) == body_bytes;
    if (!segment->is_whole)
        return 0;
    at = put_u64(put_u64(announced, first_lsn), last_lsn);
    put_u32(put_u32(at, (uint32_t)body_bytes), (uint32_t)zlib_crc32(0, body, (unsigned int)body_bytes));
    record.type = BATCH_RECORD_TYPE;
    record.payload = (Text){(const char *)announced, sizeof announced};
    put_record(opening, first_lsn, node, &record);

    const struct iovec pieces[] = {{opening, sizeof opening}, {body, body_bytes}};
    const int failed = write_both(segment->file, pieces, segment->offset);
    if (failed != 0)
        return failed;
    const double began_s = seconds();
    while (fdatasync(segment->file) != 0)
        if (errno != EINTR)
            return errno;
    segment->sync_s = seconds() - began_s;
    struct stat found;
    segment->is_named = stat(segment->path, &found) == 0 && found.st_ino == segment->inode;
    return 0;
}

PyDoc_STRVAR(commit_records_doc,
    "commit_records(descriptor, offset, path, inode, first_lsn, node_hash, records, body_bytes)\n--\n\n"
    "As append and sync of wal.log.Log: seconds that the sync took, and whether the path still is of this inode; None,\n"
    "and nothing was written, where they must be asked. Other threads run meanwhile.");

static PyObject *commit_records(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    long long file, offset, inode, first_lsn, body_bytes;
    Text path, node;
    Batch batch;
    if (count != 8 || !number_of(args[0], &file) || !number_of(args[1], &offset) || !bytes_of(args[2], &path)
        || !number_of(args[3], &inode) || !number_of(args[4], &first_lsn) || first_lsn < 0 || !bytes_of(args[5], &node)
        || node.count != NODE_HASH_BYTES || !number_of(args[7], &body_bytes) || body_bytes < 0
        || body_bytes > UINT32_MAX || !take(&batch, args + 6, 1))
        Py_RETURN_NONE;
    Segment segment = {(int)file, (off_t)offset, path.bytes, (uint64_t)inode, 0, 0, 0};
    int failed = 0;
    unsigned char *body = PyMem_Malloc((size_t)body_bytes);
    if (body == NULL)
        PyErr_NoMemory();
    else if (batch.rows > 0) {
        Py_BEGIN_ALLOW_THREADS
        failed = commit_batch(&segment, (uint64_t)first_lsn, (const unsigned char *)node.bytes, batch.values[0],
                              batch.rows, body, (size_t)body_bytes);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(body);
    release(&batch);
    if (failed != 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return answer_of(
        segment.is_whole ? Py_BuildValue("(dO)", segment.sync_s, segment.is_named ? Py_True : Py_False) : NULL,
        segment.is_whole);
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"commit_records", (PyCFunction)(void (*)(void))commit_records, METH_FASTCALL, commit_records_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "wal._native",
    .m_doc = "Batches of the WAL in C.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    static const char *const zlib[] = {"libz.so.1", NULL};
    *(void **)&zlib_crc32 = symbol_of(zlib, "crc32");
    return zlib_crc32 == NULL ? NULL : PyModule_Create(&definition);
}
