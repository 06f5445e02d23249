/*
 * The batch functions of the ledger in C: what each entry costs, and no decision.
 *
 * Each has a twin in Python, which is the specification (docs/decisions/0037): ledger.chain, ledger.merkle,
 * ledger.canonical, ledger.verification.entry_check and wal.format. A function here answers what its twin answers, byte for byte, or
 * None, and then the twin is asked: so it may give up on whatever is unusual, and need not name what is wrong.
 *
 * SHA-256 is OpenSSL's and CRC-32 is zlib's, found in the libraries that Python has loaded for hashlib and zlib.
 * Without them the module cannot be imported.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define HASH_BYTES 32
#define HEX_CHARS (2 * HASH_BYTES)
#define RECORD_HEADER_BYTES 34
#define CRC_BYTES 4
#define NODE_HASH_BYTES 4
#define NUMBER_CHARS_MAX 24
#define LINK_VERSION 2

/* --- libraries that Python has loaded ----------------------------------------------------------------------------- */

typedef union {
    char bytes[256]; /* OpenSSL's own has 112 */
    uint64_t aligned;
} Sha256State;

static int (*sha256_init)(Sha256State *);
static int (*sha256_update)(Sha256State *, const void *, size_t);
static int (*sha256_final)(unsigned char *, Sha256State *);
static unsigned long (*zlib_crc32)(unsigned long, const unsigned char *, unsigned int);

static void *symbol_of(const char *const *libraries, const char *name)
{
    for (; *libraries != NULL; libraries++) {
        void *library = dlopen(*libraries, RTLD_LAZY | RTLD_NOLOAD);
        void *found = library == NULL ? NULL : dlsym(library, name);
        if (found != NULL)
            return found;
    }
    PyErr_Format(PyExc_ImportError, "no library that Python has loaded has %s", name);
    return NULL;
}

static int find_libraries(void)
{
    static const char *const crypto[] = {"libcrypto.so.3", "libcrypto.so.1.1", NULL};
    static const char *const zlib[] = {"libz.so.1", NULL};
    return (*(void **)&sha256_init = symbol_of(crypto, "SHA256_Init")) != NULL
        && (*(void **)&sha256_update = symbol_of(crypto, "SHA256_Update")) != NULL
        && (*(void **)&sha256_final = symbol_of(crypto, "SHA256_Final")) != NULL
        && (*(void **)&zlib_crc32 = symbol_of(zlib, "crc32")) != NULL;
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *bytes;
    Py_ssize_t count;
} Text;

/* The UTF-8 of a str; 0 for anything else, and for what has no UTF-8. */
static int text_of(PyObject *value, Text *text)
{
    if (!PyUnicode_CheckExact(value))
        return 0;
    text->bytes = PyUnicode_AsUTF8AndSize(value, &text->count);
    if (text->bytes == NULL)
        PyErr_Clear();
    return text->bytes != NULL;
}

/* The value of an int that fits 64 bits; 0 for anything else, a bool too. */
static int number_of(PyObject *value, long long *number)
{
    int overflow;
    if (!PyLong_CheckExact(value))
        return 0;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0;
}

static int bytes_of(PyObject *value, Text *text)
{
    if (!PyBytes_CheckExact(value))
        return 0;
    text->bytes = PyBytes_AS_STRING(value);
    text->count = PyBytes_GET_SIZE(value);
    return 1;
}

static unsigned char *put_u32(unsigned char *at, uint32_t value)
{
    for (int shift = 24; shift >= 0; shift -= 8)
        *at++ = (unsigned char)(value >> shift);
    return at;
}

static unsigned char *put_u64(unsigned char *at, uint64_t value)
{
    return put_u32(put_u32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

static unsigned char *put(unsigned char *at, const void *bytes, size_t count)
{
    memcpy(at, bytes, count);
    return at + count;
}

/* Whether the text is these 32 bytes in lowercase hex. */
static int spells(Text text, const unsigned char *hash)
{
    static const char digits[] = "0123456789abcdef";
    if (text.count != HEX_CHARS)
        return 0;
    for (int i = 0; i < HASH_BYTES; i++)
        if (text.bytes[2 * i] != digits[hash[i] >> 4] || text.bytes[2 * i + 1] != digits[hash[i] & 15])
            return 0;
    return 1;
}

static void hash_of(const void *bytes, size_t count, unsigned char *hash)
{
    Sha256State state;
    sha256_init(&state);
    sha256_update(&state, bytes, count);
    sha256_final(hash, &state);
}

/* What a function answers: what it found, or None where that is not whole and nothing failed. */
static PyObject *answer_of(PyObject *found, int is_whole)
{
    if (is_whole)
        return found;
    Py_XDECREF(found);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Columns of one batch, as many values of one as of the other. */
typedef struct {
    PyObject *kept[16];
    PyObject **values[16];
    int columns;
    Py_ssize_t rows;
} Batch;

static void release(Batch *batch)
{
    while (batch->columns > 0)
        Py_DECREF(batch->kept[--batch->columns]);
}

/* 0 when a column is no sequence, or they differ in length. */
static int take(Batch *batch, PyObject *const *columns, int count)
{
    batch->columns = 0;
    for (int i = 0; i < count; i++) {
        PyObject *kept = PySequence_Fast(columns[i], "a column is not a sequence");
        if (kept == NULL) {
            PyErr_Clear();
            release(batch);
            return 0;
        }
        batch->kept[batch->columns++] = kept;
        batch->values[i] = PySequence_Fast_ITEMS(kept);
        if (i == 0)
            batch->rows = PySequence_Fast_GET_SIZE(kept);
        else if (batch->rows != PySequence_Fast_GET_SIZE(kept)) {
            release(batch);
            return 0;
        }
    }
    return 1;
}

/* --- chain links: ledger.chain.Linker.links ----------------------------------------------------------------------- */

/* The bytes that a link hashes, written into one piece of memory that grows. */
typedef struct {
    unsigned char *bytes;
    size_t room;
    size_t prefix_bytes;
} Message;

static int begin_message(Message *message, Text prefix)
{
    message->room = (size_t)prefix.count + 4096;
    message->prefix_bytes = (size_t)prefix.count;
    message->bytes = PyMem_Malloc(message->room);
    if (message->bytes != NULL)
        memcpy(message->bytes, prefix.bytes, message->prefix_bytes);
    return message->bytes != NULL;
}

static unsigned char *put_field(unsigned char *at, Text field)
{
    return put(put_u32(at, (uint32_t)field.count), field.bytes, (size_t)field.count);
}

/* The link over these fields; 0 when memory is out or a field is longer than can be told. */
static int hash_link(Message *message, uint64_t seq, Text hlc, Text job, Text action, Text prev, Text digest,
                     Text origin, unsigned char *link)
{
    const Text fields[] = {hlc, job, action, prev, digest, origin};
    size_t needed = message->prefix_bytes + 4 + 8;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].count > UINT32_MAX)
            return 0;
        needed += 4 + (size_t)fields[i].count;
    }
    if (needed > message->room) {
        unsigned char *larger = PyMem_Realloc(message->bytes, needed);
        if (larger == NULL)
            return 0;
        message->bytes = larger;
        message->room = needed;
    }
    unsigned char *at = put_u64(put_u32(message->bytes + message->prefix_bytes, 8), seq);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        at = put_field(at, fields[i]);
    hash_of(message->bytes, (size_t)(at - message->bytes), link);
    return 1;
}

/* An origin as it is hashed: None is empty. */
static int origin_of(PyObject *value, Text *origin)
{
    if (value == Py_None) {
        *origin = (Text){"", 0};
        return 1;
    }
    return text_of(value, origin);
}

PyDoc_STRVAR(links_doc,
    "links(prefix, first_seq, prev_chain_link, t_hlcs, job_ids, actions, payload_digests, origins)\n--\n\n"
    "As ledger.chain.Linker.links, whose prefix it takes; None where that must be asked.");

static PyObject *links(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { HLC, JOB, ACTION, DIGEST, ORIGIN, COLUMNS };
    Text prefix, prev;
    long long first_seq;
    Batch batch;
    Message message;
    if (count != 3 + COLUMNS || !bytes_of(args[0], &prefix) || !number_of(args[1], &first_seq) || first_seq < 0
        || !bytes_of(args[2], &prev) || !take(&batch, args + 3, COLUMNS))
        Py_RETURN_NONE;
    PyObject *found = PyList_New(batch.rows);
    int is_whole = found != NULL && begin_message(&message, prefix);
    if (!is_whole) {
        Py_XDECREF(found);
        release(&batch);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t row = 0; row < batch.rows && is_whole; row++) {
        Text hlc, job, action, digest, origin;
        unsigned char link[HASH_BYTES];
        is_whole = text_of(batch.values[HLC][row], &hlc) && text_of(batch.values[JOB][row], &job)
            && text_of(batch.values[ACTION][row], &action) && bytes_of(batch.values[DIGEST][row], &digest)
            && bytes_of(batch.values[ORIGIN][row], &origin)
            && hash_link(&message, (uint64_t)first_seq + (uint64_t)row, hlc, job, action, prev, digest, origin, link);
        PyObject *made = is_whole ? PyBytes_FromStringAndSize((char *)link, HASH_BYTES) : NULL;
        is_whole = made != NULL;
        if (is_whole) {
            PyList_SET_ITEM(found, row, made);
            bytes_of(made, &prev);
        }
    }
    PyMem_Free(message.bytes);
    release(&batch);
    return answer_of(found, is_whole);
}

/* --- entries in order: ledger.verification.entry_check ------------------------------------------------------------ */

/* Whether the text is "physical:logical:node". */
static int is_hlc(Text hlc, PyObject *physical, PyObject *logical, PyObject *node)
{
    long long parts[2];
    Text name;
    char numbers[2 * NUMBER_CHARS_MAX];
    if (!number_of(physical, &parts[0]) || !number_of(logical, &parts[1]) || !text_of(node, &name))
        return 0;
    int written = snprintf(numbers, sizeof numbers, "%lld:%lld:", parts[0], parts[1]);
    return hlc.count == written + name.count && memcmp(hlc.bytes, numbers, (size_t)written) == 0
        && memcmp(hlc.bytes + written, name.bytes, (size_t)name.count) == 0;
}

PyDoc_STRVAR(links_in_order_doc,
    "links_in_order(prefix, first_seq, prev_raw, prev_link, columns)\n--\n\n"
    "The links of rows that are all in order and of version 2, as EntryChecker judges them; None where that must "
    "be asked. columns are those of ENTRY_COLUMNS.");

static PyObject *links_in_order(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { SEQ, T_HLC, PHYSICAL, LOGICAL, NODE, JOB, ACTION, VERSION, PREV, LINK, DIGEST, PAYLOAD, ORIGIN, COLUMNS };
    Text prefix, prev;
    long long first_seq;
    Batch given, batch;
    Message message;
    if (count != 5 || !bytes_of(args[0], &prefix) || !number_of(args[1], &first_seq) || first_seq < 0
        || !bytes_of(args[2], &prev) || !take(&given, args + 4, 1))
        Py_RETURN_NONE;
    int is_whole = given.rows == COLUMNS && take(&batch, given.values[0], COLUMNS);
    release(&given);
    if (!is_whole)
        Py_RETURN_NONE;
    if (batch.rows == 0) {
        release(&batch);
        Py_RETURN_NONE;
    }
    PyObject *found = PyList_New(batch.rows);
    if (found == NULL || !begin_message(&message, prefix)) {
        Py_XDECREF(found);
        release(&batch);
        return PyErr_NoMemory();
    }
    PyObject *prev_stored = args[3];
    for (Py_ssize_t row = 0; row < batch.rows && is_whole; row++) {
        PyObject *const stored_prev = batch.values[PREV][row];
        Text hlc, job, action, expected, named, link_text, digest_text, payload, origin;
        long long seq, version;
        unsigned char digest[HASH_BYTES], link[HASH_BYTES];
        is_whole = number_of(batch.values[SEQ][row], &seq) && seq == first_seq + row
            && number_of(batch.values[VERSION][row], &version) && version == LINK_VERSION
            && text_of(batch.values[T_HLC][row], &hlc) && text_of(batch.values[JOB][row], &job)
            && text_of(batch.values[ACTION][row], &action) && text_of(batch.values[LINK][row], &link_text)
            && text_of(batch.values[DIGEST][row], &digest_text) && text_of(batch.values[PAYLOAD][row], &payload)
            && origin_of(batch.values[ORIGIN][row], &origin)
            && is_hlc(hlc, batch.values[PHYSICAL][row], batch.values[LOGICAL][row], batch.values[NODE][row])
            && (stored_prev == prev_stored
                || (text_of(stored_prev, &named) && text_of(prev_stored, &expected) && named.count == expected.count
                    && memcmp(named.bytes, expected.bytes, (size_t)named.count) == 0));
        if (is_whole) {
            hash_of(payload.bytes, (size_t)payload.count, digest);
            is_whole = spells(digest_text, digest)
                && hash_link(&message, (uint64_t)seq, hlc, job, action, prev, (Text){(char *)digest, HASH_BYTES},
                             origin, link)
                && spells(link_text, link);
        }
        PyObject *made = is_whole ? PyBytes_FromStringAndSize((char *)link, HASH_BYTES) : NULL;
        is_whole = made != NULL;
        if (is_whole) {
            PyList_SET_ITEM(found, row, made);
            bytes_of(made, &prev);
            prev_stored = batch.values[LINK][row];
        }
    }
    PyMem_Free(message.bytes);
    release(&batch);
    return answer_of(found, is_whole);
}

/* --- Merkle hashes: ledger.merkle --------------------------------------------------------------------------------- */

static PyObject *hash_groups(PyObject *nodes, Py_ssize_t group, unsigned char domain)
{
    Batch batch;
    unsigned char message[1 + 2 * HASH_BYTES], hash[HASH_BYTES];
    if (!take(&batch, &nodes, 1))
        Py_RETURN_NONE;
    const Py_ssize_t count = batch.rows / group;
    PyObject *found = PyList_New(count);
    int is_whole = found != NULL;
    message[0] = domain;
    for (Py_ssize_t i = 0; i < count && is_whole; i++) {
        for (Py_ssize_t part = 0; part < group && is_whole; part++) {
            Text node;
            is_whole = bytes_of(batch.values[0][i * group + part], &node) && node.count == HASH_BYTES;
            if (is_whole)
                memcpy(message + 1 + part * HASH_BYTES, node.bytes, HASH_BYTES);
        }
        if (is_whole) {
            hash_of(message, (size_t)(1 + group * HASH_BYTES), hash);
            PyObject *made = PyBytes_FromStringAndSize((char *)hash, HASH_BYTES);
            is_whole = made != NULL;
            if (is_whole)
                PyList_SET_ITEM(found, i, made);
        }
    }
    release(&batch);
    return answer_of(found, is_whole);
}

PyDoc_STRVAR(leaf_hashes_doc,
    "leaf_hashes(links)\n--\n\nAs ledger.merkle.leaf_hashes, of data of 32 bytes each; None where that must be asked.");

static PyObject *leaf_hashes(PyObject *Py_UNUSED(module), PyObject *links_given)
{
    return hash_groups(links_given, 1, 0);
}

PyDoc_STRVAR(paired_doc,
    "paired(nodes)\n--\n\nAs ledger.merkle.paired; None where that must be asked.");

static PyObject *paired(PyObject *Py_UNUSED(module), PyObject *nodes)
{
    return hash_groups(nodes, 2, 1);
}

/* --- canonical JSON: ledger.canonical ----------------------------------------------------------------------------- */

#define NESTING_MAX 64
#define INTEGER_MAX ((1LL << 53) - 1)

typedef struct {
    char *bytes;
    size_t count;
    size_t room;
} Buffer;

/* Room for so many bytes more; NULL when memory is out. */
static char *grow(Buffer *buffer, size_t more)
{
    if (buffer->count + more > buffer->room) {
        size_t room = 2 * buffer->room + more;
        char *larger = PyMem_Realloc(buffer->bytes, room);
        if (larger == NULL)
            return NULL;
        buffer->bytes = larger;
        buffer->room = room;
    }
    buffer->count += more;
    return buffer->bytes + buffer->count - more;
}

static int write_bytes(Buffer *buffer, const char *bytes, size_t count)
{
    char *at = grow(buffer, count);
    if (at == NULL)
        return 0;
    memcpy(at, bytes, count);
    return 1;
}

/* A text of ASCII in which nothing is escaped; 0 for any other. */
static int write_text(Buffer *buffer, PyObject *value)
{
    if (!PyUnicode_CheckExact(value) || !PyUnicode_IS_COMPACT_ASCII(value))
        return 0;
    const char *bytes = (const char *)PyUnicode_1BYTE_DATA(value);
    const size_t count = (size_t)PyUnicode_GET_LENGTH(value);
    char *at = grow(buffer, count + 2);
    if (at == NULL)
        return 0;
    *at++ = '"';
    for (size_t i = 0; i < count; i++) {
        if ((unsigned char)bytes[i] < 0x20 || bytes[i] == '"' || bytes[i] == '\\')
            return 0;
        *at++ = bytes[i];
    }
    *at = '"';
    return 1;
}

static int write_value(Buffer *buffer, PyObject *value, int room);

static int write_members(Buffer *buffer, PyObject *members, int room)
{
    PyObject *names = PyDict_Keys(members);
    int is_whole = names != NULL;
    const Py_ssize_t count = is_whole ? PyList_GET_SIZE(names) : 0;
    /* Only texts have an order; those of ASCII have the one that is asked for. */
    for (Py_ssize_t i = 0; i < count && is_whole; i++)
        is_whole = PyUnicode_CheckExact(PyList_GET_ITEM(names, i));
    is_whole = is_whole && PyList_Sort(names) == 0 && write_bytes(buffer, "{", 1);
    for (Py_ssize_t i = 0; i < count && is_whole; i++) {
        PyObject *name = PyList_GET_ITEM(names, i), *value = PyDict_GetItemWithError(members, name);
        is_whole = (i == 0 || write_bytes(buffer, ",", 1)) && write_text(buffer, name) && write_bytes(buffer, ":", 1)
            && value != NULL && write_value(buffer, value, room);
    }
    Py_XDECREF(names);
    return is_whole && write_bytes(buffer, "}", 1);
}

/* 0 when the value is left to Python; there may be an error then. */
static int write_value(Buffer *buffer, PyObject *value, int room)
{
    long long number;
    char digits[NUMBER_CHARS_MAX];
    if (value == Py_None)
        return write_bytes(buffer, "null", 4);
    if (value == Py_True)
        return write_bytes(buffer, "true", 4);
    if (value == Py_False)
        return write_bytes(buffer, "false", 5);
    if (number_of(value, &number)) {
        if (number > INTEGER_MAX || number < -INTEGER_MAX)
            return 0;
        return write_bytes(buffer, digits, (size_t)snprintf(digits, sizeof digits, "%lld", number));
    }
    if (PyUnicode_CheckExact(value))
        return write_text(buffer, value);
    if (room == 0)
        return 0;
    if (PyDict_CheckExact(value))
        return write_members(buffer, value, room - 1);
    if (!PyList_CheckExact(value) || !write_bytes(buffer, "[", 1))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); i++)
        if ((i != 0 && !write_bytes(buffer, ",", 1)) || !write_value(buffer, PyList_GET_ITEM(value, i), room - 1))
            return 0;
    return write_bytes(buffer, "]", 1);
}

PyDoc_STRVAR(canonical_doc,
    "canonical(value)\n--\n\n"
    "As ledger.canonical.encode; None where that must be asked: for fractions, and texts beyond plain ASCII.");

static PyObject *canonical(PyObject *Py_UNUSED(module), PyObject *value)
{
    Buffer buffer = {PyMem_Malloc(1024), 0, 1024};
    PyObject *found = NULL;
    if (buffer.bytes == NULL)
        return PyErr_NoMemory();
    const int is_whole = write_value(&buffer, value, NESTING_MAX);
    if (is_whole)
        found = PyBytes_FromStringAndSize(buffer.bytes, (Py_ssize_t)buffer.count);
    PyMem_Free(buffer.bytes);
    if (is_whole || PyErr_Occurred())
        return found;
    Py_RETURN_NONE;
}

/* --- records of the WAL: wal.format.encode_records ---------------------------------------------------------------- */

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

PyDoc_STRVAR(encode_records_doc,
    "encode_records(first_lsn, node_hash, records)\n--\n\n"
    "As wal.format.encode_records; None where that must be asked. Other threads run while records are summed.");

static PyObject *encode_records(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    long long first_lsn;
    Text node;
    Batch batch;
    if (count != 3 || !number_of(args[0], &first_lsn) || first_lsn < 0 || !bytes_of(args[1], &node)
        || node.count != NODE_HASH_BYTES || !take(&batch, args + 2, 1))
        Py_RETURN_NONE;
    Record *records = PyMem_New(Record, batch.rows ? batch.rows : 1);
    Py_ssize_t length = 0;
    int is_whole = records != NULL;
    for (Py_ssize_t i = 0; i < batch.rows && is_whole; i++) {
        is_whole = record_of(batch.values[0][i], &records[i]);
        length += is_whole ? RECORD_HEADER_BYTES + records[i].payload.count : 0;
    }
    PyObject *body = is_whole ? PyBytes_FromStringAndSize(NULL, length) : NULL;
    if (body != NULL) {
        unsigned char *at = (unsigned char *)PyBytes_AS_STRING(body);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < batch.rows; i++)
            at = put_record(at, (uint64_t)first_lsn + (uint64_t)i, (const unsigned char *)node.bytes, &records[i]);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(records);
    release(&batch);
    if (body != NULL || PyErr_Occurred())
        return body;
    Py_RETURN_NONE;
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"links", (PyCFunction)(void (*)(void))links, METH_FASTCALL, links_doc},
    {"links_in_order", (PyCFunction)(void (*)(void))links_in_order, METH_FASTCALL, links_in_order_doc},
    {"leaf_hashes", leaf_hashes, METH_O, leaf_hashes_doc},
    {"paired", paired, METH_O, paired_doc},
    {"canonical", canonical, METH_O, canonical_doc},
    {"encode_records", (PyCFunction)(void (*)(void))encode_records, METH_FASTCALL, encode_records_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ledger._native",
    .m_doc = "The batch functions of the ledger in C.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return find_libraries() ? PyModule_Create(&definition) : NULL;
}
