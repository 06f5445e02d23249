/*
 * The batch functions of the ledger in C: what each entry costs, and no decision.
 *
 * Each has a twin in Python, which is the specification (docs/decisions/0037): ledger.merkle, ledger.job_index,
 * ledger.canonical, ledger.chain.form, ledger.verification.entry_check, app.store.appended; for the lines of events,
 * app.edge.forms.requests with app.write.pending.requests; for COPY, the driver; for signatures, signing.keys.
 * A function here answers what its twin answers, byte for byte, or None, and then the twin is asked: so it may give up
 * on whatever is unusual, and need not name what is wrong.
 *
 * SHA-256 is OpenSSL's, found in the library that Python has loaded for hashlib. Without it the module cannot be
 * imported.
 */

#include "_entry_form.h"
#include "_native.h"

#include <limits.h>

#define HASH_BYTES 32
#define HEX_CHARS (2 * HASH_BYTES)
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

static int find_libraries(void)
{
    static const char *const crypto[] = {"libcrypto.so.3", "libcrypto.so.1.1", NULL};
    return (*(void **)&sha256_init = symbol_of(crypto, "SHA256_Init")) != NULL
        && (*(void **)&sha256_update = symbol_of(crypto, "SHA256_Update")) != NULL
        && (*(void **)&sha256_final = symbol_of(crypto, "SHA256_Final")) != NULL;
}

/* --- signatures: signing.keys -------------------------------------------------------------------------------------- */

enum { KEY, KEY_DONE, STATE, STATE_DONE, VERIFY_INIT, VERIFY, SHA256, NO_ERRORS, EVP_COUNT };
static void *evp[EVP_COUNT];

static void find_signatures(void)
{
    static const char *const crypto[] = {"libcrypto.so.3", NULL};
    static const char *const names[] = {"d2i_PUBKEY", "EVP_PKEY_free", "EVP_MD_CTX_new", "EVP_MD_CTX_free",
        "EVP_DigestVerifyInit", "EVP_DigestVerify", "EVP_sha256", "ERR_clear_error"};
    for (int i = 0; i < EVP_COUNT; i++)
        evp[i] = symbol_of(crypto, names[i]);
    PyErr_Clear();
}

static int made(void *key, int hashes, Text signature, Text message)
{
    void *digest = ((void *(*)(void))evp[STATE])();
    const void *hash = hashes ? ((const void *(*)(void))evp[SHA256])() : NULL;
    const int is_made = digest != NULL
        && ((int (*)(void *, void **, const void *, void *, void *))evp[VERIFY_INIT])(digest, NULL, hash, NULL, key) == 1
        && ((int (*)(void *, const char *, size_t, const char *, size_t))evp[VERIFY])(
               digest, signature.bytes, (size_t)signature.count, message.bytes, (size_t)message.count) == 1;
    ((void (*)(void *))evp[STATE_DONE])(digest);
    return is_made;
}

/* signatures_made(key, hashes, checks): for each (signature, message) of the tuple a byte: 1 when the key, a
 * SubjectPublicKeyInfo in DER, made it, over SHA-256 where hashes is true; 0 where signing.keys.PublicKey.made must
 * be asked. The interpreter's lock is free meanwhile. */
static PyObject *signatures_made(PyObject *Py_UNUSED(module), PyObject *args)
{
    Text der;
    int hashes, are_there = 1;
    PyObject *checks;
    if (!PyArg_ParseTuple(args, "y#pO!", &der.bytes, &der.count, &hashes, &PyTuple_Type, &checks))
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(checks);
    Text *texts = PyMem_Calloc((size_t)count + 1, 2 * sizeof *texts);
    PyObject *found = texts == NULL ? PyErr_NoMemory() : PyBytes_FromStringAndSize(NULL, count);
    for (int i = 0; i < EVP_COUNT; i++)
        are_there = are_there && evp[i] != NULL;
    for (Py_ssize_t i = 0; i < count && found != NULL && are_there; i++) {
        PyObject *check = PyTuple_GET_ITEM(checks, i);
        are_there = PyTuple_CheckExact(check) && PyTuple_GET_SIZE(check) == 2
            && bytes_of(PyTuple_GET_ITEM(check, 0), &texts[2 * i])
            && bytes_of(PyTuple_GET_ITEM(check, 1), &texts[2 * i + 1]);
    }
    if (found != NULL && are_there) {
        char *each = PyBytes_AS_STRING(found);
        Py_BEGIN_ALLOW_THREADS
        const unsigned char *at = (const unsigned char *)der.bytes;
        void *key = ((void *(*)(void *, const unsigned char **, long))evp[KEY])(NULL, &at, (long)der.count);
        for (Py_ssize_t i = 0; i < count; i++)
            each[i] = (char)(key != NULL && made(key, hashes, texts[2 * i], texts[2 * i + 1]));
        ((void (*)(void *))evp[KEY_DONE])(key);
        ((void (*)(void))evp[NO_ERRORS])();
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(texts);
    return answer_of(found, are_there);
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static void write_hex(char *at, const unsigned char *hash)
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < HASH_BYTES; i++) {
        *at++ = digits[hash[i] >> 4];
        *at++ = digits[hash[i] & 15];
    }
}

/* Whether the text is these 32 bytes in lowercase hex. */
static int spells(Text text, const unsigned char *hash)
{
    char hex[HEX_CHARS];
    write_hex(hex, hash);
    return text.count == HEX_CHARS && memcmp(text.bytes, hex, HEX_CHARS) == 0;
}

static char *write_decimal(char *at, long long number)
{
    char digits[NUMBER_CHARS_MAX];
    unsigned long long left = number < 0 ? 0ULL - (unsigned long long)number : (unsigned long long)number;
    size_t count = 0;
    do
        digits[sizeof digits - ++count] = (char)('0' + left % 10);
    while ((left /= 10) > 0);
    if (number < 0)
        digits[sizeof digits - ++count] = '-';
    memcpy(at, digits + sizeof digits - count, count);
    return at + count;
}

/* "physical:logical:"; how many characters that is. */
static Py_ssize_t write_stamp(char *at, const Entry *entry)
{
    char *end = write_decimal(at, entry->physical);
    *end++ = ':';
    end = write_decimal(end, entry->logical);
    *end++ = ':';
    return end - at;
}

/* Memory that grows. It needs no lock of the interpreter's. */
typedef struct {
    char *bytes;
    size_t count;
    size_t room;
} Buffer;

/* Room for so many bytes more; NULL when memory is out. */
static inline char *grow(Buffer *buffer, size_t more)
{
    if (buffer->count + more > buffer->room) {
        const size_t room = 2 * buffer->room + more + 1024;
        char *const larger = PyMem_RawRealloc(buffer->bytes, room);
        if (larger == NULL)
            return NULL;
        buffer->bytes = larger;
        buffer->room = room;
    }
    buffer->count += more;
    return buffer->bytes + buffer->count - more;
}

static inline int write_bytes(Buffer *buffer, const char *bytes, size_t count)
{
    char *at = grow(buffer, count);
    if (at == NULL)
        return 0;
    memcpy(at, bytes, count);
    return 1;
}

static void hash_of(const void *bytes, size_t count, unsigned char *hash)
{
    Sha256State state;
    sha256_init(&state);
    sha256_update(&state, bytes, count);
    sha256_final(hash, &state);
}

/* --- chain links: ledger.chain.Linker.link ------------------------------------------------------------------------ */

/* The bytes that a link hashes, behind the same prefix each. */
typedef struct {
    Buffer buffer;
    Text prefix;
} Message;

/* A text behind its length; one that is none has the length that COPY gives to NULL. */
static unsigned char *put_field(unsigned char *at, Text field)
{
    if (field.bytes == NULL)
        return put_u32(at, UINT32_MAX);
    return put(put_u32(at, (uint32_t)field.count), field.bytes, (size_t)field.count);
}

/* The link of an entry with this digest behind that link; 0 when memory is out or a field is longer than can be told. */
static int hash_link(Message *message, const Entry *entry, Text prev, unsigned char *digest, unsigned char *link)
{
    const Text origin = entry->origin.bytes == NULL ? (Text){"", 0} : entry->origin;
    const Text fields[] = {entry->hlc, entry->job, entry->action, prev, {(char *)digest, HASH_BYTES}, origin};
    size_t needed = (size_t)message->prefix.count + 4 + 8;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].count > UINT32_MAX)
            return 0;
        needed += 4 + (size_t)fields[i].count;
    }
    message->buffer.count = 0;
    unsigned char *const begin = (unsigned char *)grow(&message->buffer, needed), *at = begin;
    if (begin == NULL)
        return 0;
    at = put_u64(put_u32(put(at, message->prefix.bytes, (size_t)message->prefix.count), 8), (uint64_t)entry->seq);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        at = put_field(at, fields[i]);
    hash_of(begin, needed, link);
    return 1;
}

/* --- entries in order: ledger.verification.entry_check ------------------------------------------------------------ */

/* Whether the HLC is that of the columns beside it. */
static int spells_hlc(const Entry *entry)
{
    char numbers[2 * NUMBER_CHARS_MAX + 2];
    const Py_ssize_t written = write_stamp(numbers, entry);
    return entry->hlc.count == written + entry->node.count && memcmp(entry->hlc.bytes, numbers, (size_t)written) == 0
        && memcmp(entry->hlc.bytes + written, entry->node.bytes, (size_t)entry->node.count) == 0;
}

/* The parts of the HLC, which are numbers of at most 18 digits and whatever follows; 0 for any other text. */
static int split_hlc(Entry *entry)
{
    const char *at = entry->hlc.bytes, *const end = at + entry->hlc.count;
    long long *const parts[] = {&entry->physical, &entry->logical};
    for (int part = 0; part < 2; part++) {
        const char *const first = at;
        for (*parts[part] = 0; at < end && *at >= '0' && *at <= '9' && at - first < 18; at++)
            *parts[part] = 10 * *parts[part] + (*at - '0');
        if (at == first || (*first == '0' && at - first > 1) || at == end || *at++ != ':')
            return 0;
    }
    entry->node = (Text){at, end - at};
    return 1;
}

/* A text, or none where it is None. */
static int text_or_null_of(PyObject *value, Text *text)
{
    *text = (Text){NULL, 0};
    return value == Py_None || text_of(value, text);
}

/* --- Merkle hashes: ledger.merkle --------------------------------------------------------------------------------- */

static void hash_pair(const void *left, const void *right, unsigned char *hash)
{
    unsigned char message[1 + 2 * HASH_BYTES] = {1};
    put(put(message + 1, left, HASH_BYTES), right, HASH_BYTES);
    hash_of(message, sizeof message, hash);
}

/* paired(nodes): as ledger.merkle.paired; None where that must be asked. */
static PyObject *paired(PyObject *Py_UNUSED(module), PyObject *nodes)
{
    Batch batch;
    unsigned char hash[HASH_BYTES];
    if (!take(&batch, &nodes, 1))
        Py_RETURN_NONE;
    PyObject *found = PyList_New(batch.rows / 2);
    int is_whole = found != NULL;
    for (Py_ssize_t i = 0; i < batch.rows / 2 && is_whole; i++) {
        Text left, right;
        is_whole = bytes_of(batch.values[0][2 * i], &left) && left.count == HASH_BYTES
            && bytes_of(batch.values[0][2 * i + 1], &right) && right.count == HASH_BYTES;
        if (!is_whole)
            break;
        hash_pair(left.bytes, right.bytes, hash);
        is_whole = set_item(found, i, PyBytes_FromStringAndSize((char *)hash, HASH_BYTES));
    }
    release(&batch);
    return answer_of(found, is_whole);
}

/* --- the index of jobs: ledger.job_index --------------------------------------------------------------------------- */

#define COUNT_BYTES 8
#define LEAF_BYTES (HASH_BYTES + COUNT_BYTES + HASH_BYTES)
#define RECORD_BYTES (COUNT_BYTES + HASH_BYTES)
#define RUNS_MAX 8
#define PIECE_LEAVES_MAX 256

enum { OF_ENTRIES = 2, OF_PARTS = 3 };

typedef struct {
    const unsigned char *key;
    size_t place;
} Keyed;

static int order_of_keys(const void *one, const void *other)
{
    const Keyed *a = one, *b = other;
    const int order = memcmp(a->key, b->key, HASH_BYTES);
    return order != 0 ? order : (a->place > b->place) - (a->place < b->place);
}

/* The bytes made so far as Python has them; NULL when memory is out. */
static PyObject *bytes_made(unsigned char *bytes, const unsigned char *end)
{
    PyObject *found = PyBytes_FromStringAndSize((char *)bytes, end - bytes);
    PyMem_RawFree(bytes);
    return found;
}

/* block_leaves(first_leaf, keys, hashes): as ledger.job_index.block_leaves; None where that must be asked. */
static PyObject *block_leaves(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    long long first;
    Text keys, hashes;
    if (count != 3 || !number_of(args[0], &first) || first < 0 || !bytes_of(args[1], &keys) || !bytes_of(args[2], &hashes)
        || keys.count != hashes.count || keys.count % HASH_BYTES != 0)
        Py_RETURN_NONE;
    const size_t entries = (size_t)keys.count / HASH_BYTES;
    Keyed *const order = PyMem_RawMalloc((entries + 1) * (sizeof *order + RECORD_BYTES + LEAF_BYTES));
    if (order == NULL)
        return PyErr_NoMemory();
    unsigned char *const records = (unsigned char *)(order + entries);
    unsigned char *const leaves = records + 1 + entries * RECORD_BYTES;
    unsigned char *at = leaves;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < entries; i++)
        order[i] = (Keyed){(const unsigned char *)keys.bytes + HASH_BYTES * i, i};
    qsort(order, entries, sizeof *order, order_of_keys);
    records[0] = OF_ENTRIES;
    for (size_t i = 0; i < entries;) {
        const unsigned char *const key = order[i].key;
        unsigned char *record = records + 1;
        uint64_t of_job = 0;
        for (; i < entries && memcmp(order[i].key, key, HASH_BYTES) == 0; i++, of_job++) {
            record = put_u64(record, (uint64_t)first + order[i].place);
            record = put(record, hashes.bytes + HASH_BYTES * order[i].place, HASH_BYTES);
        }
        at = put_u64(put(at, key, HASH_BYTES), of_job);
        hash_of(records, (size_t)(record - records), at);
        at += HASH_BYTES;
    }
    Py_END_ALLOW_THREADS
    PyObject *found = PyBytes_FromStringAndSize((char *)leaves, at - leaves);
    PyMem_RawFree(order);
    return found;
}

/* Writes the leaves of the run over neighbouring runs; returns where they end. */
static unsigned char *merge_runs(Cursor *runs, Py_ssize_t count, unsigned char *at)
{
    unsigned char parts[1 + RUNS_MAX * RECORD_BYTES] = {OF_PARTS};
    for (;;) {
        const unsigned char *key = NULL;
        for (Py_ssize_t i = 0; i < count; i++)
            if (runs[i].at < runs[i].end && (key == NULL || memcmp(runs[i].at, key, HASH_BYTES) < 0))
                key = runs[i].at;
        if (key == NULL)
            return at;
        unsigned char *part = parts + 1;
        uint64_t of_job = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (runs[i].at == runs[i].end || memcmp(runs[i].at, key, HASH_BYTES) != 0)
                continue;
            of_job += u64_at(runs[i].at + HASH_BYTES);
            part = put(part, runs[i].at + HASH_BYTES, RECORD_BYTES);
            runs[i].at += LEAF_BYTES;
        }
        at = put(at, key, HASH_BYTES);
        if (part == parts + 1 + RECORD_BYTES) {
            at = put(at, parts + 1, RECORD_BYTES);
            continue;
        }
        at = put_u64(at, of_job);
        hash_of(parts, (size_t)(part - parts), at);
        at += HASH_BYTES;
    }
}

/* merged_leaves(runs): as ledger.job_index.merged_leaves; None where that must be asked. */
static PyObject *merged_leaves(PyObject *Py_UNUSED(module), PyObject *given)
{
    Batch batch;
    Cursor runs[RUNS_MAX];
    size_t bytes = 0;
    if (!take(&batch, &given, 1))
        Py_RETURN_NONE;
    int is_whole = batch.rows <= RUNS_MAX;
    for (Py_ssize_t i = 0; i < batch.rows && is_whole; i++) {
        Text run;
        is_whole = bytes_of(batch.values[0][i], &run) && run.count % LEAF_BYTES == 0;
        if (!is_whole)
            break;
        runs[i] = cursor_of(run);
        bytes += (size_t)run.count;
    }
    unsigned char *leaves = is_whole ? PyMem_RawMalloc(bytes + 1) : NULL, *end = leaves;
    if (leaves != NULL) {
        Py_BEGIN_ALLOW_THREADS
        end = merge_runs(runs, batch.rows, leaves);
        Py_END_ALLOW_THREADS
    }
    release(&batch);
    if (leaves == NULL)
        return is_whole ? PyErr_NoMemory() : answer_of(NULL, 0);
    return bytes_made(leaves, end);
}

/* The root of the tree over up to PIECE_LEAVES_MAX leaves, at least one. */
static void hash_piece(const unsigned char *leaves, size_t count, unsigned char *root)
{
    unsigned char nodes[PIECE_LEAVES_MAX][HASH_BYTES], leaf[1 + LEAF_BYTES] = {0};
    for (size_t i = 0; i < count; i++) {
        memcpy(leaf + 1, leaves + LEAF_BYTES * i, LEAF_BYTES);
        hash_of(leaf, sizeof leaf, nodes[i]);
    }
    /* A last node without a sibling goes up as it is, which gives the tree of RFC 9162. */
    for (; count > 1; count = (count + 1) / 2)
        for (size_t i = 0; i < count; i += 2) {
            if (i + 1 == count)
                memmove(nodes[i / 2], nodes[i], HASH_BYTES);
            else
                hash_pair(nodes[i], nodes[i + 1], nodes[i / 2]);
        }
    memcpy(root, nodes[0], HASH_BYTES);
}

/* piece_roots(leaves, piece_leaves): as ledger.job_index.piece_roots, the roots one after the other; None where that
 * must be asked. */
static PyObject *piece_roots(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    long long piece;
    Text leaves;
    if (count != 2 || !bytes_of(args[0], &leaves) || leaves.count % LEAF_BYTES != 0 || !number_of(args[1], &piece)
        || piece < 1 || piece > PIECE_LEAVES_MAX)
        Py_RETURN_NONE;
    const size_t all = (size_t)leaves.count / LEAF_BYTES, step = (size_t)piece;
    unsigned char *roots = PyMem_RawMalloc((all / step + 1) * HASH_BYTES), *at = roots;
    if (roots == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (size_t first = 0; first < all; first += step, at += HASH_BYTES)
        hash_piece((const unsigned char *)leaves.bytes + LEAF_BYTES * first, all - first < step ? all - first : step, at);
    Py_END_ALLOW_THREADS
    return bytes_made(roots, at);
}

/* --- canonical JSON: ledger.canonical ----------------------------------------------------------------------------- */

#define NESTING_MAX 64

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
        return write_bytes(buffer, digits, (size_t)(write_decimal(digits, number) - digits));
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

/* canonical(value): as ledger.canonical.encode; None where that must be asked: for fractions, and texts beyond plain
 * ASCII. */
static PyObject *canonical(PyObject *Py_UNUSED(module), PyObject *value)
{
    Buffer buffer = {NULL, 0, 0};
    const int is_whole = write_value(&buffer, value, NESTING_MAX);
    PyObject *found = is_whole ? PyBytes_FromStringAndSize(buffer.bytes, (Py_ssize_t)buffer.count) : NULL;
    PyMem_RawFree(buffer.bytes);
    return answer_of(found, is_whole);
}

/* --- rows of new entries: app.store.appended, and as COPY takes them: app.store.chaining ---------------------------- */

static PyObject *hex_of(const unsigned char *hash)
{
    PyObject *made = PyUnicode_New(HEX_CHARS, 127);
    if (made != NULL)
        write_hex((char *)PyUnicode_1BYTE_DATA(made), hash);
    return made;
}

/* The HLC as the entry has it, and "physical:logical:node"; NULL, without an error, where that is none. */
static PyObject *hlc_text_of(PyObject *hlc, Entry *entry)
{
    char text[2 * NUMBER_CHARS_MAX + 2 * HEX_CHARS];
    if (!PyTuple_Check(hlc) || PyTuple_GET_SIZE(hlc) != 3 || !number_of(PyTuple_GET_ITEM(hlc, 0), &entry->physical)
        || !number_of(PyTuple_GET_ITEM(hlc, 1), &entry->logical) || !text_of(PyTuple_GET_ITEM(hlc, 2), &entry->node)
        || entry->node.count > 2 * HEX_CHARS)
        return NULL;
    const Py_ssize_t written = write_stamp(text, entry);
    memcpy(text + written, entry->node.bytes, (size_t)entry->node.count);
    return PyUnicode_FromStringAndSize(text, written + entry->node.count);
}

/* Whether these bytes are UTF-8. */
static int is_utf8(Text text)
{
    Cursor rest = cursor_of(text);
    for (uint64_t word; rest.end - rest.at >= (Py_ssize_t)sizeof word; rest.at += sizeof word) {
        memcpy(&word, rest.at, sizeof word);
        if (word & 0x8080808080808080u)
            break;
    }
    while (rest.at < rest.end)
        if (*rest.at < 0x80)
            rest.at++;
        else if (!skips_wide(&rest))
            return 0;
    return 1;
}

/* Columns in the binary form of COPY: how many bytes, and the value. */
static unsigned char *put_integer(unsigned char *at, long long number)
{
    return put_u64(put_u32(at, 8), (uint64_t)number);
}

/* new_rows(tenant_id, prefix, first_seq, head_link, head_raw, entries, place_type): as app.store.appended.new_rows:
 * rows of LOG_COLUMNS as COPY takes them, and seq, HLC and link of each as a tuple of that type; None where that
 * must be asked. */
static PyObject *new_rows(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { COLUMNS = 14, LENGTHS_AND_INTEGERS = 2 + 4 * COLUMNS + 3 * 8 + 2 };
    enum { ENTRY_HLC, ENTRY_JOB, ENTRY_ACTION, ENTRY_PAYLOAD, ENTRY_ORIGIN, ENTRY_PARTS };
    Text tenant, prev, prev_hex;
    Message message = {.buffer = {NULL, 0, 0}};
    long long first_seq;
    Batch batch;
    unsigned char link[HASH_BYTES];
    if (count != 7 || !PyType_Check(args[6]))
        Py_RETURN_NONE;
    PyTypeObject *const place_type = (PyTypeObject *)args[6];
    if (!PyType_IsSubtype(place_type, &PyTuple_Type) || !text_of(args[0], &tenant) || !bytes_of(args[1], &message.prefix)
        || !number_of(args[2], &first_seq) || first_seq < 1 || !text_or_null_of(args[3], &prev_hex)
        || !bytes_of(args[4], &prev) || !take(&batch, args + 5, 1))
        Py_RETURN_NONE;
    Buffer out = {NULL, 0, 0};
    PyObject *places = PyList_New(batch.rows);
    int is_whole = places != NULL;
    for (Py_ssize_t row = 0; row < batch.rows && is_whole; row++) {
        PyObject *given = batch.values[0][row], *t_hlc = NULL, *chain_link = NULL, *place = NULL;
        PyObject *const *const parts = ((PyTupleObject *)given)->ob_item;
        Entry entry = {.seq = first_seq + row};
        unsigned char digest[HASH_BYTES];
        is_whole = PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == ENTRY_PARTS
            && (t_hlc = hlc_text_of(parts[ENTRY_HLC], &entry)) != NULL && text_of(t_hlc, &entry.hlc)
            && text_of(parts[ENTRY_JOB], &entry.job) && text_of(parts[ENTRY_ACTION], &entry.action)
            && bytes_of(parts[ENTRY_PAYLOAD], &entry.payload) && is_utf8(entry.payload)
            && text_or_null_of(parts[ENTRY_ORIGIN], &entry.origin) && entry.payload.count <= INT32_MAX
            && entry.origin.count <= INT32_MAX;
        if (is_whole) {
            hash_of(entry.payload.bytes, (size_t)entry.payload.count, digest);
            is_whole = hash_link(&message, &entry, prev, digest, link) && (chain_link = hex_of(link)) != NULL;
            prev = (Text){(char *)link, HASH_BYTES};
        }
        unsigned char *at = !is_whole ? NULL
            : (unsigned char *)grow(&out, (size_t)(LENGTHS_AND_INTEGERS + tenant.count + entry.hlc.count + entry.node.count
                                                   + entry.job.count + entry.action.count + prev_hex.count + 2 * HEX_CHARS
                                                   + entry.payload.count + entry.origin.count));
        if (at != NULL) {
            *at++ = 0;
            *at++ = COLUMNS;
            at = put_integer(put_field(at, tenant), entry.seq);
            at = put_integer(put_integer(put_field(at, entry.hlc), entry.physical), entry.logical);
            at = put_field(put_field(put_field(at, entry.node), entry.job), entry.action);
            at = put_u32(at, 2);
            *at++ = 0;
            *at++ = LINK_VERSION;
            at = put_field(at, prev_hex);
            text_of(chain_link, &prev_hex);
            at = put_u32(put_field(at, prev_hex), HEX_CHARS);
            write_hex((char *)at, digest);
            at = put_field(put_field(at + HEX_CHARS, entry.payload), entry.origin);
            out.count = (size_t)(at - (unsigned char *)out.bytes);
            PyObject *number = PyLong_FromLongLong(entry.seq);
            PyObject *values = number == NULL ? NULL : PyTuple_Pack(4, number, t_hlc, chain_link, parts[ENTRY_JOB]);
            PyObject *boxed = values == NULL ? NULL : PyTuple_Pack(1, values);
            place = boxed == NULL ? NULL : PyTuple_Type.tp_new(place_type, boxed, NULL);
            Py_XDECREF(number);
            Py_XDECREF(values);
            Py_XDECREF(boxed);
        }
        Py_XDECREF(t_hlc);
        Py_XDECREF(chain_link);
        is_whole = set_item(places, row, place);
    }
    PyMem_RawFree(message.buffer.bytes);
    release(&batch);
    PyObject *found = is_whole ? Py_BuildValue("(NO)", PyBytes_FromStringAndSize(out.bytes, (Py_ssize_t)out.count), places)
                               : NULL;
    PyMem_RawFree(out.bytes);
    Py_XDECREF(places);
    return answer_of(found, found != NULL);
}

/* --- lines of events: app.write.pending.requests ------------------------------------------------------------------ */

#define DEPTH_MAX 32
#define MEMBERS_MAX 64
#define DIGITS_MAX 15 /* of an integer: what has more may be beyond INTEGER_MAX */
#define FORMS_MAX 32
#define FIELDS_MAX 16

/* What a value of JSON is; of an array of texts, the shortest and longest of them. */
typedef struct {
    char kind; /* 's' a text, 'i' an integer, 'o' an object, 'l' an array of texts, '?' anything else */
    long long least, most; /* a number; how many characters, the least and the most of all */
    Py_ssize_t count;      /* of an array */
    size_t at, end;        /* its canonical bytes */
} Value;

typedef struct {
    Text name;
    size_t at, end; /* of name and value, canonical */
    Value value;
} Member;

static void skip_space(Cursor *source)
{
    while (source->at < source->end
           && (*source->at == ' ' || *source->at == '\t' || *source->at == '\r' || *source->at == '\n'))
        source->at++;
}

static int next_is(Cursor *source, char wanted)
{
    skip_space(source);
    return skips(source, wanted);
}

static int write_source(Buffer *out, const unsigned char *from, const Cursor *source)
{
    return write_bytes(out, (const char *)from, (size_t)(source->at - from));
}

/* A text of ASCII in which nothing is escaped, at its first quote. */
static int read_text(Cursor *source, Text *text)
{
    const unsigned char *at = ++source->at;
    while (at < source->end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
        at++;
    if (at == source->end || *at != '"')
        return 0;
    *text = (Text){(const char *)source->at, at - source->at};
    source->at = at + 1;
    return 1;
}

static int read_integer(Cursor *source, long long *number)
{
    const int is_negative = *source->at == '-';
    source->at += is_negative;
    const unsigned char *digits = source->at;
    for (*number = 0; source->at < source->end && *source->at >= '0' && *source->at <= '9'; source->at++) {
        if (source->at - digits == DIGITS_MAX)
            return 0;
        *number = 10 * *number + (*source->at - '0');
    }
    const Py_ssize_t count = source->at - digits;
    if (count == 0 || (*digits == '0' && (count > 1 || is_negative)))
        return 0;
    if (source->at < source->end && (*source->at == '.' || *source->at == 'e' || *source->at == 'E'))
        return 0;
    *number = is_negative ? -*number : *number;
    return 1;
}

/* Sorts by name; 0 when two have the same one, 1 when they were in order, else 2. */
static int sort_members(Member *members, int count)
{
    int found = 1;
    for (int i = 1; i < count; i++) {
        const Member member = members[i];
        int at = i, order = -1;
        while (at > 0 && (order = order_of(members[at - 1].name, member.name)) > 0) {
            members[at] = members[at - 1];
            at--;
            found = 2;
        }
        if (order == 0)
            return 0;
        members[at] = member;
    }
    return found;
}

static int read_value(Cursor *source, Buffer *out, int room, Value *value);

/* Members behind the opening brace, each as ``"name":value``, canonical, with a comma before all but the first. */
static int read_members(Cursor *source, Buffer *out, int room, Member *members, int *count)
{
    *count = 0;
    if (next_is(source, '}'))
        return 1;
    do {
        if (*count == MEMBERS_MAX || (*count > 0 && !write_bytes(out, ",", 1)))
            return 0;
        Member *member = &members[(*count)++];
        skip_space(source);
        const unsigned char *from = source->at;
        member->at = out->count;
        if (source->at == source->end || *source->at != '"' || !read_text(source, &member->name)
            || !write_source(out, from, source) || !next_is(source, ':') || !write_bytes(out, ":", 1)
            || !read_value(source, out, room, &member->value))
            return 0;
        member->end = out->count;
    } while (next_is(source, ','));
    return next_is(source, '}');
}

/* Brings members that were written into order; 0 when two have the same name. */
static int rewrite(Buffer *out, size_t from, Member *members, int count)
{
    const int order = sort_members(members, count);
    if (order != 2)
        return order;
    const size_t length = out->count - from;
    char *copy = PyMem_Malloc(length), *at = copy;
    if (copy == NULL)
        return 0;
    for (int i = 0; i < count; i++) {
        if (i > 0)
            *at++ = ',';
        memcpy(at, out->bytes + members[i].at, members[i].end - members[i].at);
        at += members[i].end - members[i].at;
    }
    memcpy(out->bytes + from, copy, length);
    PyMem_Free(copy);
    return 1;
}

static int read_object(Cursor *source, Buffer *out, int room)
{
    Member members[MEMBERS_MAX];
    int count;
    if (!write_bytes(out, "{", 1))
        return 0;
    const size_t from = out->count;
    return read_members(source, out, room, members, &count) && rewrite(out, from, members, count)
        && write_bytes(out, "}", 1);
}

static int read_array(Cursor *source, Buffer *out, int room, Value *array)
{
    array->kind = 'l';
    array->least = LLONG_MAX;
    array->most = 0;
    if (!write_bytes(out, "[", 1))
        return 0;
    for (int is_closed = next_is(source, ']'); !is_closed; array->count++) {
        Value item;
        if ((array->count > 0 && !write_bytes(out, ",", 1)) || !read_value(source, out, room, &item))
            return 0;
        if (item.kind != 's')
            array->kind = '?';
        array->least = item.least < array->least ? item.least : array->least;
        array->most = item.most > array->most ? item.most : array->most;
        is_closed = !next_is(source, ',');
        if (is_closed && !next_is(source, ']'))
            return 0;
    }
    return write_bytes(out, "]", 1);
}

static int read_literal(Cursor *source, Buffer *out, const char *literal)
{
    return skips_text(source, literal) && write_bytes(out, literal, strlen(literal));
}

/* Writes the canonical bytes of a value; 0 when it is left to Python. */
static int read_value(Cursor *source, Buffer *out, int room, Value *value)
{
    Text text;
    int is_whole;
    skip_space(source);
    *value = (Value){.kind = '?', .at = out->count};
    if (source->at == source->end || room == 0)
        return 0;
    const unsigned char *from = source->at;
    switch (*from) {
    case '"':
        value->kind = 's';
        is_whole = read_text(source, &text) && write_source(out, from, source);
        value->least = value->most = source->at - from - 2;
        break;
    case '{':
        source->at++;
        value->kind = 'o';
        is_whole = read_object(source, out, room - 1);
        break;
    case '[':
        source->at++;
        is_whole = read_array(source, out, room - 1, value);
        break;
    case 't':
        is_whole = read_literal(source, out, "true");
        break;
    case 'f':
        is_whole = read_literal(source, out, "false");
        break;
    case 'n':
        is_whole = read_literal(source, out, "null");
        break;
    default:
        value->kind = 'i';
        is_whole = read_integer(source, &value->least) && write_source(out, from, source);
        value->most = value->least;
    }
    value->end = out->count;
    return is_whole;
}

/* What a field may be: a kind of Value, and what its numbers must lie between; of an array, also how many there may
   be. */
typedef struct {
    Text name;
    long long kind, least, most, count_max, is_required;
} Field;

typedef struct {
    Text name;
    PyObject *type;
    int is_creation, fields;
    Field field[FIELDS_MAX];
} Form;

static int field_of(PyObject *given, Field *field)
{
    if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != 6)
        return 0;
    PyObject *const *parts = &PyTuple_GET_ITEM(given, 0);
    return text_of(parts[0], &field->name) && number_of(parts[1], &field->kind) && number_of(parts[2], &field->least)
        && number_of(parts[3], &field->most) && number_of(parts[4], &field->count_max)
        && number_of(parts[5], &field->is_required);
}

/* (name, type, whether it creates, fields) each; 0 when that is not what was given. */
static int forms_of(PyObject *given, Form *forms, int *count)
{
    if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) > FORMS_MAX)
        return 0;
    *count = (int)PyTuple_GET_SIZE(given);
    for (int i = 0; i < *count; i++) {
        PyObject *parts = PyTuple_GET_ITEM(given, i);
        if (!PyTuple_CheckExact(parts) || PyTuple_GET_SIZE(parts) != 4
            || !text_of(PyTuple_GET_ITEM(parts, 0), &forms[i].name))
            return 0;
        PyObject *fields = PyTuple_GET_ITEM(parts, 3);
        if (!PyTuple_CheckExact(fields) || PyTuple_GET_SIZE(fields) > FIELDS_MAX)
            return 0;
        forms[i].type = PyTuple_GET_ITEM(parts, 1);
        forms[i].is_creation = PyTuple_GET_ITEM(parts, 2) == Py_True;
        forms[i].fields = (int)PyTuple_GET_SIZE(fields);
        for (int at = 0; at < forms[i].fields; at++)
            if (!field_of(PyTuple_GET_ITEM(fields, at), &forms[i].field[at]))
                return 0;
    }
    return 1;
}

/* ledger.names.JOB_ID */
static int is_job_id(Text name)
{
    return is_name_of(name, JOB_ID_CHARS_MAX, IN_JOB_ID) && !is_text(name, ".") && !is_text(name, "..");
}

/* ledger.names.TENANT_ID */
static int is_tenant_id(Text name)
{
    return is_name_of(name, TENANT_CHARS_MAX, IN_TENANT_ID) && strchr("_-", name.bytes[0]) == NULL
        && strchr("_-", name.bytes[name.count - 1]) == NULL;
}

/* Whether the members are those of the form, with what it requires. */
static int fits(const Form *form, const Member *members, int count)
{
    long long required = 0;
    for (int at = 0; at < form->fields; at++)
        required += form->field[at].is_required;
    for (int i = 0; i < count; i++) {
        const Value *value = &members[i].value;
        const Field *field = form->field, *end = field + form->fields;
        while (field < end && !is_same_text(field->name, members[i].name))
            field++;
        if (field == end || value->kind != field->kind || value->count > field->count_max)
            return 0;
        if (value->kind != 'o' && !(value->kind == 'l' && value->count == 0)
            && (value->least < field->least || value->most > field->most))
            return 0;
        required -= field->is_required;
    }
    return required == 0;
}

/* One line, as far as it was understood. */
typedef struct {
    Buffer values;  /* all its values, canonical */
    Buffer payload;
    Text tenant, job;
    const Form *form;
    const Member *fence;
    size_t fence_at, member_at, signature_at;
    Text spec, assigned;
} Line;

static Text written(const Buffer *out, size_t at, size_t end)
{
    return (Text){out->bytes + at, (Py_ssize_t)(end - at)};
}

static Text content(const Buffer *out, const Value *value)
{
    return written(out, value->at + 1, value->end - 1);
}

#define FENCE "fence_token"
#define KEY_MEMBER "idempotency"
#define SIGNATURE_MEMBER "signature"

/* Writes the payload: all members but tenant and job, and a fence of 1 where there is none. */
static int write_payload(Line *line, Member *members, int count)
{
    if (line->fence == NULL)
        members[count++] = (Member){.name = {FENCE, sizeof FENCE - 1}};
    if (!sort_members(members, count))
        return 0;
    line->payload.count = line->member_at = line->signature_at = 0;
    line->fence = NULL;
    for (int i = 0; i < count; i++) {
        const Member *member = &members[i];
        if (!write_bytes(&line->payload, i == 0 ? "{" : ",", 1))
            return 0;
        if (line->member_at == 0 && order_of(member->name, (Text){KEY_MEMBER, sizeof KEY_MEMBER - 1}) > 0)
            line->member_at = line->payload.count;
        if (line->signature_at == 0
            && order_of(member->name, (Text){SIGNATURE_MEMBER, sizeof SIGNATURE_MEMBER - 1}) > 0)
            line->signature_at = line->payload.count;
        const int is_fence = is_text(member->name, FENCE), is_given = member->end > 0;
        if (is_fence)
            line->fence_at = line->payload.count + sizeof "\"" FENCE "\":" - 1;
        if (is_fence && is_given)
            line->fence = member;
        if (!(is_given ? write_bytes(&line->payload, line->values.bytes + member->at, member->end - member->at)
                       : write_bytes(&line->payload, "\"" FENCE "\":1", sizeof "\"" FENCE "\":1" - 1)))
            return 0;
    }
    return write_bytes(&line->payload, "}", 1);
}

/* 0 when the line is left to Python. */
static int read_line(Text given, const Form *forms, int form_count, Line *line, Member *members)
{
    Cursor source = cursor_of(given);
    int count, kept = 0;
    line->values.count = 1; /* what is somewhere is never at 0 */
    line->tenant = line->job = line->spec = line->assigned = (Text){NULL, 0};
    line->form = NULL;
    line->fence = NULL;
    if (!next_is(&source, '{') || !read_members(&source, &line->values, DEPTH_MAX, members, &count))
        return 0;
    skip_space(&source);
    if (source.at != source.end || count > MEMBERS_MAX - 2)
        return 0;
    Member *type = NULL;
    for (int i = 0; i < count; i++) {
        Member *member = &members[i];
        const int is_string = member->value.kind == 's';
        if (is_string && line->tenant.bytes == NULL && is_text(member->name, "tenant_id"))
            line->tenant = content(&line->values, &member->value);
        else if (is_string && line->job.bytes == NULL && is_text(member->name, "job_id"))
            line->job = content(&line->values, &member->value);
        else if (is_string && type == NULL && is_text(member->name, "type")) {
            members[MEMBERS_MAX - 1] = *member;
            type = &members[MEMBERS_MAX - 1];
        }
        else
            members[kept++] = *member;
    }
    if (type == NULL || !is_tenant_id(line->tenant) || (line->job.bytes != NULL && !is_job_id(line->job)))
        return 0;
    const Text named = content(&line->values, &type->value);
    for (int i = 0; i < form_count && line->form == NULL; i++)
        if (is_same_text(forms[i].name, named))
            line->form = &forms[i];
    if (line->form == NULL || (line->job.bytes == NULL && !line->form->is_creation)
        || !fits(line->form, members, kept))
        return 0;
    for (int i = 0; i < kept; i++) {
        const Text value = written(&line->values, members[i].value.at, members[i].value.end);
        if (is_text(members[i].name, FENCE))
            line->fence = &members[i];
        else if (is_text(members[i].name, "spec"))
            line->spec = value;
        else if (is_text(members[i].name, "assigned_dcs"))
            line->assigned = value;
    }
    members[kept++] = *type;
    return write_payload(line, members, kept);
}

/* The creation_digest of a JobCreated line, in hex. */
static PyObject *creation_of(const Line *line)
{
    const Text parts[] = {
        {"{\"assigned_dcs\":", 16}, line->assigned.bytes ? line->assigned : (Text){"[]", 2},
        {",\"spec\":", 8}, line->spec.bytes ? line->spec : (Text){"{}", 2}, {"}", 1},
    };
    Sha256State state;
    unsigned char hash[HASH_BYTES];
    sha256_init(&state);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        sha256_update(&state, parts[i].bytes, (size_t)parts[i].count);
    sha256_final(hash, &state);
    return hex_of(hash);
}

/* The one object that stands for an equal one in ``known``; steals ``value``, which may be NULL. */
static PyObject *same(PyObject *known, PyObject *value)
{
    PyObject *kept = value == NULL ? NULL : PyDict_SetDefault(known, value, value);
    Py_XINCREF(kept);
    Py_XDECREF(value);
    return kept;
}

static PyObject *job_of(const Line *line, PyObject *known)
{
    PyObject *tenant = same(known, PyUnicode_FromStringAndSize(line->tenant.bytes, line->tenant.count));
    PyObject *job = line->job.bytes == NULL ? Py_NewRef(Py_None)
                                            : PyUnicode_FromStringAndSize(line->job.bytes, line->job.count);
    PyObject *pair = tenant == NULL || job == NULL ? NULL : PyTuple_Pack(2, tenant, job);
    Py_XDECREF(tenant);
    Py_XDECREF(job);
    return same(known, pair);
}

/* event_lines(lines, forms, bytes_max): columns of the events in lines: (tenant, job), type, fence, payload, where
 * fence and key stand in it, creation, where a signature stands; None in the first of them for a line that is left
 * to Python. */
static PyObject *event_lines(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { JOB, TYPE, FENCE_TOKEN, PAYLOAD, FENCE_AT, MEMBER_AT, CREATION, SIGNATURE_AT, COLUMNS };
    static Form forms[FORMS_MAX];
    Member members[MEMBERS_MAX];
    Line line = {.values = {NULL, 0, 0}, .payload = {NULL, 0, 0}};
    long long bytes_max;
    int form_count;
    Batch batch;
    if (count != 3 || !forms_of(args[1], forms, &form_count) || !number_of(args[2], &bytes_max)
        || !take(&batch, args, 1))
        Py_RETURN_NONE;
    PyObject *known = PyDict_New(), *columns = PyTuple_New(COLUMNS);
    int is_whole = known != NULL && columns != NULL;
    for (int column = 0; column < COLUMNS && is_whole; column++)
        is_whole = set_item(columns, column, PyList_New(batch.rows));
    is_whole = is_whole && grow(&line.values, 4096) != NULL;
    for (Py_ssize_t row = 0; row < batch.rows && is_whole; row++) {
        PyObject *made[COLUMNS] = {NULL};
        Text given;
        if (bytes_of(batch.values[0][row], &given) && given.count <= bytes_max
            && read_line(given, forms, form_count, &line, members)) {
            const int is_known = line.form->is_creation && line.job.bytes != NULL;
            made[JOB] = job_of(&line, known);
            made[TYPE] = Py_NewRef(line.form->type);
            made[FENCE_TOKEN] = line.fence == NULL ? Py_NewRef(Py_None)
                                                   : PyLong_FromLongLong(line.fence->value.least);
            made[PAYLOAD] = PyBytes_FromStringAndSize(line.payload.bytes, (Py_ssize_t)line.payload.count);
            made[FENCE_AT] = PyLong_FromSize_t(line.fence_at);
            made[MEMBER_AT] = PyLong_FromSize_t(line.member_at);
            made[CREATION] = is_known ? creation_of(&line) : Py_NewRef(Py_None);
            made[SIGNATURE_AT] = PyLong_FromSize_t(line.signature_at);
        }
        else {
            is_whole = !PyErr_Occurred();
            for (int column = 0; column < COLUMNS; column++)
                made[column] = Py_NewRef(Py_None);
        }
        for (int column = 0; column < COLUMNS; column++) {
            is_whole = is_whole && made[column] != NULL;
            PyList_SET_ITEM(PyTuple_GET_ITEM(columns, column), row, made[column]);
        }
    }
    PyMem_RawFree(line.values.bytes);
    PyMem_RawFree(line.payload.bytes);
    Py_XDECREF(known);
    release(&batch);
    if (!is_whole && !PyErr_Occurred())
        PyErr_NoMemory();
    return is_whole ? columns : (Py_XDECREF(columns), NULL);
}

/* --- entries as they came, judged without values of Python: ledger.verification.entry_check ------------------------ */

/* Where entries come from. ``next`` gives 1 and the next of them, 0 where there is none, -1 where it gives up. */
typedef struct Entries {
    int (*next)(struct Entries *entries, Entry *entry);
    const unsigned char *start;
    Cursor rest;
    Text tenant;              /* of lines: as the last member of each has it */
    unsigned char *unescaped; /* of lines: as long as all of them, for what they spell with escapes */
    unsigned char *unescaped_at;
    const struct Array *arrays; /* of columns */
    long long row, rows;
} Entries;

typedef struct {
    long long seq;
    unsigned char link[HASH_BYTES];
    Text hlc;
} Marked;

/* A walk over entries that are all in order. */
typedef struct {
    Message message;
    long long next_seq, stop_seq;
    int is_prev_known;
    unsigned char prev_raw[HASH_BYTES]; /* of the entry before, of so many bytes */
    Py_ssize_t prev_bytes;
    Text prev_link, first_prev, last_hlc; /* as they are stored */
    Buffer leaves, keys; /* of each entry: its leaf hash, and the key of its job */
    Py_ssize_t count;
    long long commitments; /* entries whose verdicts are judged later: ledger.verification.commitment_check */
    Buffer signed_; /* entries that callers may have signed, or all: ledger.verification.caller_check */
    int sees_all;
    Marked *marked;
    Py_ssize_t marks, marks_passed;
} Walk;

static int nibble_of(char hex)
{
    return hex >= '0' && hex <= '9' ? hex - '0' : hex >= 'a' && hex <= 'f' ? hex - 'a' + 10 : -1;
}

/* The 32 bytes that the text spells in lowercase hex; 0 where it does not. */
static int raw_of(Text text, unsigned char *raw)
{
    if (text.count != HEX_CHARS)
        return 0;
    for (int i = 0; i < HASH_BYTES; i++) {
        const int high = nibble_of(text.bytes[2 * i]), low = nibble_of(text.bytes[2 * i + 1]);
        if (high < 0 || low < 0)
            return 0;
        raw[i] = (unsigned char)(high << 4 | low);
    }
    return 1;
}

/* Whether it is that of a proposal or of a capacity. */
static int is_of_commitments(Text action)
{
    return is_text(action, "CAPACITY_SET") || is_text(action, "PROPOSE_ACCEPTED") || is_text(action, "PROPOSE_REJECTED");
}

/* Whether the payload may have a caller's signature: ledger.signed_events.MARK. */
static int has_mark(Text payload)
{
    return memmem(payload.bytes, (size_t)payload.count, SIGNATURE_MEMBER, sizeof SIGNATURE_MEMBER - 1) != NULL;
}

/* Whether digest, HLC, link and form are those of the entry, behind that link; ``link`` becomes its own. */
static int is_sound(Message *message, const Entry *entry, Text prev, unsigned char *link)
{
    unsigned char digest[HASH_BYTES];
    if (entry->version != LINK_VERSION || !spells_hlc(entry))
        return 0;
    hash_of(entry->payload.bytes, (size_t)entry->payload.count, digest);
    return spells(entry->digest, digest)
        && hash_link(message, entry, prev, digest, link) && spells(entry->link, link) && has_form(entry);
}

static void hash_leaf(const unsigned char *link, unsigned char *hash)
{
    unsigned char leaf[1 + HASH_BYTES] = {0};
    memcpy(leaf + 1, link, HASH_BYTES);
    hash_of(leaf, sizeof leaf, hash);
}

/* Judges the entry against the one before it; 0 where it is not in order. */
static int pass(Walk *walk, const Entry *entry)
{
    unsigned char link[HASH_BYTES];
    if (!walk->is_prev_known) {
        /* What the first names as the one before it is believed. */
        walk->prev_link = entry->prev;
        walk->prev_bytes = entry->prev.bytes == NULL ? 0 : HASH_BYTES;
        if (entry->prev.bytes != NULL && !raw_of(entry->prev, walk->prev_raw))
            return 0;
        walk->is_prev_known = 1;
    }
    const Text prev = {(char *)walk->prev_raw, walk->prev_bytes};
    if (entry->seq != walk->next_seq || !is_same_text(entry->prev, walk->prev_link)
        || !is_sound(&walk->message, entry, prev, link))
        return 0;
    char *const leaf = grow(&walk->leaves, HASH_BYTES), *const key = grow(&walk->keys, HASH_BYTES);
    if (leaf == NULL || key == NULL)
        return 0;
    hash_leaf(link, (unsigned char *)leaf);
    hash_of(entry->job.bytes, (size_t)entry->job.count, (unsigned char *)key);
    while (walk->marks_passed < walk->marks && walk->marked[walk->marks_passed].seq < entry->seq)
        walk->marks_passed++;
    if (walk->marks_passed < walk->marks && walk->marked[walk->marks_passed].seq == entry->seq) {
        memcpy(walk->marked[walk->marks_passed].link, link, HASH_BYTES);
        walk->marked[walk->marks_passed].hlc = entry->hlc;
    }
    walk->commitments += entry->origin.bytes == NULL && is_of_commitments(entry->action);
    if ((walk->sees_all || has_mark(entry->payload))
        && !write_bytes(&walk->signed_, (const char *)entry, sizeof *entry))
        return 0;
    if (walk->count++ == 0)
        walk->first_prev = walk->prev_link; /* the same text, and one that stays where it is */
    memcpy(walk->prev_raw, link, HASH_BYTES);
    walk->prev_bytes = HASH_BYTES;
    walk->prev_link = entry->link;
    walk->last_hlc = entry->hlc;
    walk->next_seq++;
    return 1;
}

/* Passes all entries that there are up to ``stop_seq``; 0 where one is not in order. */
static int pass_all(Walk *walk, Entries *entries)
{
    for (;;) {
        Entry entry;
        const unsigned char *at = entries->rest.at;
        const long long row = entries->row;
        const int found = entries->next(entries, &entry);
        if (found <= 0)
            return found == 0;
        if (entry.seq > walk->stop_seq) {
            entries->rest.at = at;
            entries->row = row;
            return 1;
        }
        if (!pass(walk, &entry))
            return 0;
    }
}

static PyObject *text_or_none(Text text)
{
    return text.bytes == NULL ? Py_NewRef(Py_None) : PyUnicode_FromStringAndSize(text.bytes, text.count);
}

/* The marks that were passed, as (seq, link, HLC); NULL where an error was set. */
static PyObject *marks_of(const Walk *walk)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < walk->marks; i++) {
        const Marked *mark = &walk->marked[i];
        if (mark->hlc.bytes == NULL)
            continue;
        PyObject *one = Py_BuildValue("(Ly#s#)", mark->seq, (const char *)mark->link, (Py_ssize_t)HASH_BYTES,
                                      mark->hlc.bytes, mark->hlc.count);
        if (one == NULL || PyList_Append(found, one) < 0)
            Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

/* The entries that callers may have signed, as ledger.verification.caller_check.Entry; NULL where an error was set. */
static PyObject *signed_of(const Walk *walk)
{
    const Py_ssize_t count = (Py_ssize_t)(walk->signed_.count / sizeof(Entry));
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        const Entry *entry = (const Entry *)(const void *)walk->signed_.bytes + i;
        if (!set_item(found, i,
                      Py_BuildValue("(Ls#s#s#s#N)", entry->seq, entry->hlc.bytes, entry->hlc.count, entry->job.bytes,
                                    entry->job.count, entry->action.bytes, entry->action.count, entry->payload.bytes,
                                    entry->payload.count, text_or_none(entry->origin))))
            Py_CLEAR(found);
    }
    return found;
}

/* What was passed, as ledger.verification.entry_check.Passed has it. */
static PyObject *passed_of(const Walk *walk, long long at)
{
    PyObject *leaves = PyList_New(walk->count);
    for (Py_ssize_t i = 0; leaves != NULL && i < walk->count; i++)
        if (!set_item(leaves, i, PyBytes_FromStringAndSize(walk->leaves.bytes + HASH_BYTES * i, HASH_BYTES)))
            Py_CLEAR(leaves);
    if (leaves == NULL)
        return NULL;
    return Py_BuildValue("(NNNNNNNLNL)", leaves, PyBytes_FromStringAndSize(walk->keys.bytes, HASH_BYTES * walk->count),
                         marks_of(walk), text_or_none(walk->first_prev),
                         PyBytes_FromStringAndSize((const char *)walk->prev_raw, walk->prev_bytes),
                         text_or_none(walk->prev_link), text_or_none(walk->last_hlc), walk->commitments, signed_of(walk),
                         at);
}

enum { PREFIX, FIRST_SEQ, PREV_RAW, PREV_LINK, STOP_SEQ, TO_MARK, SEES_ALL, KNOWN };

/* Walks over ``entries`` from what is known: prefix, first seq, raw and stored link before it (both None where they are
 * not known), last seq, seqs to be marked, and whether all entries are kept. What the texts of ``known`` are of MUST stay. */
static PyObject *walked(PyObject *const *known, Entries *entries)
{
    Text prefix, raw = {"", 0};
    Batch to_mark;
    Walk walk = {.is_prev_known = known[PREV_RAW] != Py_None, .sees_all = known[SEES_ALL] == Py_True};
    if (!bytes_of(known[PREFIX], &prefix) || !number_of(known[FIRST_SEQ], &walk.next_seq) || walk.next_seq < 0
        || (walk.is_prev_known && (!bytes_of(known[PREV_RAW], &raw) || raw.count > HASH_BYTES))
        || (known[PREV_LINK] != Py_None && !text_of(known[PREV_LINK], &walk.prev_link))
        || !PyBool_Check(known[SEES_ALL]) || !number_of(known[STOP_SEQ], &walk.stop_seq) || !take(&to_mark, known + TO_MARK, 1))
        Py_RETURN_NONE;
    memcpy(walk.prev_raw, raw.bytes, (size_t)raw.count);
    walk.prev_bytes = raw.count;
    walk.message.prefix = prefix;
    walk.marked = PyMem_RawCalloc((size_t)to_mark.rows + 1, sizeof *walk.marked);
    int is_whole = walk.marked != NULL;
    for (; is_whole && walk.marks < to_mark.rows; walk.marks++)
        is_whole = number_of(to_mark.values[0][walk.marks], &walk.marked[walk.marks].seq);
    release(&to_mark);
    if (is_whole) {
        Py_BEGIN_ALLOW_THREADS
        is_whole = pass_all(&walk, entries);
        Py_END_ALLOW_THREADS
    }
    PyObject *found = is_whole ? passed_of(&walk, entries->arrays == NULL ? entries->rest.at - entries->start : entries->row)
                               : NULL;
    PyMem_RawFree(walk.message.buffer.bytes);
    PyMem_RawFree(walk.leaves.bytes);
    PyMem_RawFree(walk.keys.bytes);
    PyMem_RawFree(walk.marked);
    PyMem_RawFree(walk.signed_.bytes);
    return answer_of(found, found != NULL);
}

/* ENTRY_COLUMNS */
enum { SEQ, T_HLC, PHYSICAL, LOGICAL, NODE, JOB, ACTION, VERSION, PREV, LINK, DIGEST, PAYLOAD, ORIGIN, ENTRY_COLUMNS };

static int entry_of(PyObject *const *values, Entry *entry)
{
    return number_of(values[SEQ], &entry->seq) && entry->seq >= 0 && number_of(values[PHYSICAL], &entry->physical)
        && number_of(values[LOGICAL], &entry->logical) && number_of(values[VERSION], &entry->version)
        && text_of(values[T_HLC], &entry->hlc) && text_of(values[NODE], &entry->node)
        && text_of(values[JOB], &entry->job) && text_of(values[ACTION], &entry->action)
        && text_or_null_of(values[PREV], &entry->prev) && text_of(values[LINK], &entry->link)
        && text_of(values[DIGEST], &entry->digest) && text_of(values[PAYLOAD], &entry->payload)
        && text_or_null_of(values[ORIGIN], &entry->origin);
}

/* --- entries by themselves: ledger.verification.entry_check ---------------------------------------------------------- */

/* leaves_of_entries(prefix, rows): leaf hashes of rows of ENTRY_COLUMNS, as
 * ledger.verification.entry_check.leaves_of has them: each row has version 2, its digest, HLC and link are those of
 * its columns, and it has the form of an entry. None where that must be asked. */
static PyObject *leaves_of_entries(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Batch rows;
    Message message = {.buffer = {NULL, 0, 0}};
    if (count != 2 || !bytes_of(args[0], &message.prefix) || !take(&rows, args + 1, 1))
        Py_RETURN_NONE;
    PyObject *found = PyList_New(rows.rows);
    int is_whole = found != NULL;
    for (Py_ssize_t number = 0; number < rows.rows && is_whole; number++) {
        PyObject *const row = rows.values[0][number];
        Entry entry;
        unsigned char prev_raw[HASH_BYTES], link[HASH_BYTES], hash[HASH_BYTES];
        is_whole = PyTuple_CheckExact(row) && PyTuple_GET_SIZE(row) == ENTRY_COLUMNS
            && entry_of(((PyTupleObject *)row)->ob_item, &entry)
            && (entry.prev.bytes == NULL || raw_of(entry.prev, prev_raw))
            && is_sound(&message, &entry, (Text){(char *)prev_raw, entry.prev.bytes == NULL ? 0 : HASH_BYTES}, link);
        if (is_whole) {
            hash_leaf(link, hash);
            is_whole = set_item(found, number, PyBytes_FromStringAndSize((char *)hash, HASH_BYTES));
        }
    }
    PyMem_RawFree(message.buffer.bytes);
    release(&rows);
    return answer_of(found, is_whole);
}

/* --- as COPY gives them in its binary form */

/* The next column; its bytes are NULL where it is. */
static int next_copied(Entries *entries, Text *column)
{
    if (entries->rest.end - entries->rest.at < 4)
        return 0;
    const uint32_t count = u32_at(entries->rest.at);
    entries->rest.at += 4;
    if (count == UINT32_MAX) {
        *column = (Text){NULL, 0};
        return 1;
    }
    if (count > (size_t)(entries->rest.end - entries->rest.at))
        return 0;
    *column = (Text){(const char *)entries->rest.at, (Py_ssize_t)count};
    entries->rest.at += count;
    return 1;
}

/* 1 where a row of so many columns begins, 0 at the end, -1 where there is anything else. */
static int begins_row(Entries *entries, int columns)
{
    if (entries->rest.end - entries->rest.at < 2)
        return entries->rest.end == entries->rest.at ? 0 : -1;
    const int count = entries->rest.at[0] << 8 | entries->rest.at[1];
    entries->rest.at += 2;
    return count == columns ? 1 : count == UINT16_MAX && entries->rest.end == entries->rest.at ? 0 : -1;
}

/* An integer of two, four or eight bytes. */
static int integer_in(Text column, long long *number)
{
    const unsigned char *at = (const unsigned char *)column.bytes;
    if (at == NULL || (column.count != 2 && column.count != 4 && column.count != 8))
        return 0;
    uint64_t value = (at[0] & 0x80) != 0 ? UINT64_MAX : 0;
    for (Py_ssize_t i = 0; i < column.count; i++)
        value = value << 8 | at[i];
    *number = (long long)value;
    return 1;
}

static int next_in_copy(Entries *entries, Entry *entry)
{
    Text columns[ENTRY_COLUMNS];
    const int is_next = begins_row(entries, ENTRY_COLUMNS);
    if (is_next <= 0)
        return is_next;
    for (int i = 0; i < ENTRY_COLUMNS; i++)
        if (!next_copied(entries, &columns[i]) || (columns[i].bytes == NULL && i != PREV && i != ORIGIN))
            return -1;
    *entry = (Entry){.hlc = columns[T_HLC], .node = columns[NODE], .job = columns[JOB], .action = columns[ACTION],
                     .prev = columns[PREV], .link = columns[LINK], .digest = columns[DIGEST],
                     .payload = columns[PAYLOAD], .origin = columns[ORIGIN]};
    return integer_in(columns[SEQ], &entry->seq) && integer_in(columns[PHYSICAL], &entry->physical)
            && integer_in(columns[LOGICAL], &entry->logical) && integer_in(columns[VERSION], &entry->version)
        ? 1 : -1;
}

/* entries_in_copy(prefix, first_seq, prev_raw, prev_link, stop_seq, to_mark, sees_all, data): what rows in the
 * binary form of COPY come to, the first column being the first of ENTRY_COLUMNS; None where they are not all in
 * order. */
static PyObject *entries_in_copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Text data;
    if (count != KNOWN + 1 || !bytes_of(args[KNOWN], &data))
        Py_RETURN_NONE;
    Entries entries = {.next = next_in_copy, .start = (const unsigned char *)data.bytes, .rest = cursor_of(data)};
    return walked(args, &entries);
}

/* --- rows of COPY as tuples: app.store.chain_reader, app.store.chaining */

#define COPIED_COLUMNS_MAX 16

/* The value of a column: of 'i' an integer, else a text, which is the one of the row before where it is the same. */
static PyObject *copied_value(char type, Text column, Text before, PyObject *value_before)
{
    long long number;
    if (column.bytes == NULL)
        return Py_NewRef(Py_None);
    if (type == 'i')
        return integer_in(column, &number) ? PyLong_FromLongLong(number) : NULL;
    if (before.bytes != NULL && is_same_text(column, before))
        return Py_NewRef(value_before);
    return PyUnicode_DecodeUTF8(column.bytes, column.count, NULL);
}

/* Appends the next row, whose columns are then ``before``; 0 at the end, -1 where it gives up. */
static int append_copied(Entries *entries, Text types, Text *before, PyObject *rows)
{
    const int count = (int)types.count, is_next = begins_row(entries, count);
    if (is_next <= 0)
        return is_next;
    const Py_ssize_t row = PyList_GET_SIZE(rows);
    PyObject *last = row > 0 ? PyList_GET_ITEM(rows, row - 1) : NULL, *values = PyTuple_New(count);
    for (int i = 0; values != NULL && i < count; i++) {
        Text column;
        PyObject *value = !next_copied(entries, &column) ? NULL
            : copied_value(types.bytes[i], column, before[i], last == NULL ? NULL : PyTuple_GET_ITEM(last, i));
        if (set_item(values, i, value))
            before[i] = column;
        else
            Py_CLEAR(values);
    }
    const int is_appended = values != NULL && PyList_Append(rows, values) == 0;
    Py_XDECREF(values);
    return is_appended ? 1 : -1;
}

/* rows_in_copy(types, data): rows in the binary form of COPY, a tuple each; ``types`` has an i for each column of
 * integers, a t for one of texts. None where they are no such rows. */
static PyObject *rows_in_copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Text types, data, before[COPIED_COLUMNS_MAX] = {{NULL, 0}};
    if (count != 2 || !bytes_of(args[0], &types) || !bytes_of(args[1], &data) || types.count > COPIED_COLUMNS_MAX)
        Py_RETURN_NONE;
    Entries entries = {.rest = cursor_of(data)};
    PyObject *rows = PyList_New(0);
    int found = rows == NULL ? -1 : 1;
    while (found > 0)
        found = append_copied(&entries, types, before, rows);
    if (found < 0 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        PyErr_Clear();
    return answer_of(rows, found == 0);
}

/* --- as lines of a bundle: ledger.bundle.rows */

static int after(Entries *entries, const char *wanted, size_t count)
{
    if ((size_t)(entries->rest.end - entries->rest.at) < count || memcmp(entries->rest.at, wanted, count) != 0)
        return 0;
    entries->rest.at += count;
    return 1;
}

#define AFTER(entries, wanted) after(entries, wanted, sizeof wanted - 1)

/* What is escaped by one letter, by that letter; 0 for what is spelt otherwise in canonical JSON. */
static unsigned char unescaped_of(unsigned char letter)
{
    switch (letter) {
    case '"': case '\\': return letter;
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    default: return 0;
    }
}

/* A text behind its opening quote, and the quote that ends it; 0 where it is not as canonical JSON has it, or has an
 * escape of four digits. */
static int next_text(Entries *entries, Text *text)
{
    const unsigned char *from = entries->rest.at;
    unsigned char *to = NULL, *const begin = entries->unescaped_at;
    for (const unsigned char *at = from; at < entries->rest.end; at++) {
        if (*at == '"') {
            *text = to == NULL ? (Text){(const char *)from, at - from} : (Text){(const char *)begin, to - begin};
            entries->unescaped_at = to == NULL ? begin : to;
            entries->rest.at = at + 1;
            return 1;
        }
        if (*at < 0x20)
            return 0;
        if (*at == '\\') {
            if (to == NULL) {
                memcpy(begin, from, (size_t)(at - from));
                to = begin + (at - from);
            }
            if (++at == entries->rest.end || (*to++ = unescaped_of(*at)) == 0)
                return 0;
        }
        else if (to != NULL)
            *to++ = *at;
    }
    return 0;
}

static int next_text_or_null(Entries *entries, Text *text)
{
    *text = (Text){NULL, 0};
    return AFTER(entries, "null") || (AFTER(entries, "\"") && next_text(entries, text));
}

/* A whole number from 0 to 2^53 - 1. */
static int next_count(Entries *entries, long long *number)
{
    return skips_number(&entries->rest, number) && *number >= 0;
}

static int next_in_lines(Entries *entries, Entry *entry)
{
    if (entries->rest.at == entries->rest.end)
        return 0;
    return AFTER(entries, "{\"action\":\"") && next_text(entries, &entry->action)
            && AFTER(entries, ",\"chain_link\":\"") && next_text(entries, &entry->link)
            && AFTER(entries, ",\"hlc_logical\":") && next_count(entries, &entry->logical)
            && AFTER(entries, ",\"hlc_node\":\"") && next_text(entries, &entry->node)
            && AFTER(entries, ",\"hlc_physical\":") && next_count(entries, &entry->physical)
            && AFTER(entries, ",\"job_id\":\"") && next_text(entries, &entry->job)
            && AFTER(entries, ",\"link_version\":") && next_count(entries, &entry->version)
            && AFTER(entries, ",\"origin\":") && next_text_or_null(entries, &entry->origin)
            && AFTER(entries, ",\"payload\":\"") && next_text(entries, &entry->payload)
            && AFTER(entries, ",\"payload_digest\":\"") && next_text(entries, &entry->digest)
            && AFTER(entries, ",\"prev_chain_link\":") && next_text_or_null(entries, &entry->prev)
            && AFTER(entries, ",\"seq\":") && next_count(entries, &entry->seq)
            && AFTER(entries, ",\"t_hlc\":\"") && next_text(entries, &entry->hlc)
            && AFTER(entries, ",\"tenant_id\":") && after(entries, entries->tenant.bytes, (size_t)entries->tenant.count)
            && AFTER(entries, "}\n")
            /* It outlives the line, so it must stand there as it is; a link does that is the entry's own, as no digit is
             * spelt with an escape. */
            && (const unsigned char *)entry->hlc.bytes >= entries->start
            && (const unsigned char *)entry->hlc.bytes < entries->rest.end
        ? 1 : -1;
}

/* entries_in_lines(prefix, first_seq, prev_raw, prev_link, stop_seq, to_mark, sees_all, lines, at, tenant): what
 * lines of a bundle come to from that byte on, which are UTF-8; tenant as JSON. None where they are not all
 * canonical, or not all in order. */
static PyObject *entries_in_lines(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    Text lines, tenant;
    long long at;
    if (count != KNOWN + 3 || !bytes_of(args[KNOWN], &lines) || !number_of(args[KNOWN + 1], &at) || at < 0
        || at > lines.count || !bytes_of(args[KNOWN + 2], &tenant))
        Py_RETURN_NONE;
    Entries entries = {.next = next_in_lines, .start = (const unsigned char *)lines.bytes, .rest = cursor_of(lines),
                       .tenant = tenant};
    entries.rest.at += at;
    entries.unescaped = entries.unescaped_at = PyMem_RawMalloc((size_t)(lines.count - at) + 1);
    if (entries.unescaped == NULL)
        return PyErr_NoMemory();
    PyObject *found = walked(args, &entries);
    PyMem_RawFree(entries.unescaped);
    return found;
}

/* --- as columns of Arrow */

/* One column: integers of 64 bits, or texts with offsets of 32; ``first`` is where its first value stands. */
typedef struct Array {
    const unsigned char *valid; /* NULL where all are */
    const char *values;
    const int32_t *offsets; /* NULL of integers */
    Py_ssize_t valid_bytes, value_bytes, offset_bytes;
    long long first;
} Array;

static int is_valid(const Array *array, long long row)
{
    const long long at = array->first + row;
    return array->valid == NULL || (array->valid[at >> 3] >> (at & 7) & 1) != 0;
}

static int number_at(const Array *array, long long row, long long *number)
{
    if (!is_valid(array, row))
        return 0;
    memcpy(number, array->values + sizeof(int64_t) * (size_t)(array->first + row), sizeof(int64_t));
    return 1;
}

static int text_at(const Array *array, long long row, int may_be_null, Text *text)
{
    *text = (Text){NULL, 0};
    if (!is_valid(array, row))
        return may_be_null;
    const int32_t begin = array->offsets[array->first + row], end = array->offsets[array->first + row + 1];
    if (begin < 0 || end < begin || end > array->value_bytes)
        return 0;
    *text = (Text){array->values == NULL ? "" : array->values + begin, end - begin};
    return 1;
}

static int next_in_columns(Entries *entries, Entry *entry)
{
    const Array *arrays = entries->arrays;
    const long long row = entries->row;
    if (row == entries->rows)
        return 0;
    entries->row++;
    return number_at(&arrays[SEQ], row, &entry->seq) && text_at(&arrays[T_HLC], row, 0, &entry->hlc)
            && number_at(&arrays[PHYSICAL], row, &entry->physical) && number_at(&arrays[LOGICAL], row, &entry->logical)
            && text_at(&arrays[NODE], row, 0, &entry->node) && text_at(&arrays[JOB], row, 0, &entry->job)
            && text_at(&arrays[ACTION], row, 0, &entry->action) && number_at(&arrays[VERSION], row, &entry->version)
            && text_at(&arrays[PREV], row, 1, &entry->prev) && text_at(&arrays[LINK], row, 0, &entry->link)
            && text_at(&arrays[DIGEST], row, 0, &entry->digest) && text_at(&arrays[PAYLOAD], row, 0, &entry->payload)
            && text_at(&arrays[ORIGIN], row, 1, &entry->origin)
        ? 1 : -1;
}

/* The bytes of an object that has a buffer, of None none; the view is to be released where 1 is answered. */
static int buffer_of(PyObject *value, Py_buffer *view)
{
    *view = (Py_buffer){.buf = NULL};
    if (value == Py_None)
        return 1;
    if (PyObject_GetBuffer(value, view, PyBUF_SIMPLE) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

/* entries_in_columns(prefix, first_seq, prev_raw, prev_link, stop_seq, to_mark, sees_all, rows, columns): what rows
 * in columns of Arrow come to, each (validity, values, offsets, first): integers of 64 bits, whose offsets are None,
 * or texts, in the order of ENTRY_COLUMNS. None where they are not all in order. */
static PyObject *entries_in_columns(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { VALIDITY, VALUES, OFFSETS, BUFFERS };
    static const char kinds[] = "itiittti" "ttttt";
    Py_buffer views[ENTRY_COLUMNS][BUFFERS];
    Array arrays[ENTRY_COLUMNS];
    Batch columns;
    Entries entries = {.next = next_in_columns, .arrays = arrays};
    if (count != KNOWN + 2 || !number_of(args[KNOWN], &entries.rows) || entries.rows < 0 || entries.rows > INT32_MAX
        || !take(&columns, args + KNOWN + 1, 1))
        Py_RETURN_NONE;
    int is_whole = columns.rows == ENTRY_COLUMNS, viewed = 0;
    for (int i = 0; i < ENTRY_COLUMNS && is_whole; i++) {
        PyObject *column = columns.values[0][i];
        Array *array = &arrays[i];
        is_whole = PyTuple_CheckExact(column) && PyTuple_GET_SIZE(column) == BUFFERS + 1
            && number_of(PyTuple_GET_ITEM(column, BUFFERS), &array->first) && array->first >= 0
            && array->first <= INT32_MAX;
        for (int part = 0; part < BUFFERS && is_whole; part++)
            if ((is_whole = buffer_of(PyTuple_GET_ITEM(column, part), &views[i][part])))
                viewed++;
        if (!is_whole)
            break;
        array->valid = views[i][VALIDITY].buf;
        array->values = views[i][VALUES].buf;
        array->offsets = views[i][OFFSETS].buf;
        array->value_bytes = views[i][VALUES].len;
        const long long end = array->first + entries.rows;
        const Py_ssize_t fixed = kinds[i] == 'i' ? views[i][VALUES].len : views[i][OFFSETS].len;
        const long long needed = kinds[i] == 'i' ? 8 * end : 4 * (end + 1);
        is_whole = (array->offsets == NULL) == (kinds[i] == 'i') && fixed >= needed
            && (array->valid == NULL || 8 * (long long)views[i][VALIDITY].len >= end);
    }
    PyObject *found = is_whole ? walked(args, &entries) : NULL;
    for (int i = 0; i < viewed; i++)
        PyBuffer_Release(&views[i / BUFFERS][i % BUFFERS]);
    release(&columns);
    return answer_of(found, found != NULL);
}

/* --- the form of entries: ledger.chain.form ----------------------------------------------------------------------- */

/* are_well_formed(t_hlcs, job_ids, actions, payloads, origins): true where each of these entries of version 2 has
 * the form of an entry; None where the twin must be asked. */
static PyObject *are_well_formed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    enum { T_HLC, JOB, ACTION, PAYLOAD, ORIGIN, COLUMNS };
    Batch batch = {0};
    if (count != COLUMNS || !take(&batch, args, COLUMNS))
        Py_RETURN_NONE;
    int is_whole = 1;
    for (Py_ssize_t row = 0; row < batch.rows && is_whole; row++) {
        Entry entry = {.version = LINK_VERSION};
        is_whole = text_of(batch.values[T_HLC][row], &entry.hlc) && split_hlc(&entry)
            && text_of(batch.values[JOB][row], &entry.job) && text_of(batch.values[ACTION][row], &entry.action)
            && text_of(batch.values[PAYLOAD][row], &entry.payload)
            && text_or_null_of(batch.values[ORIGIN][row], &entry.origin) && has_form(&entry);
    }
    release(&batch);
    if (is_whole)
        Py_RETURN_TRUE;
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    METHOD(signatures_made, signatures_made, METH_VARARGS),
    METHOD(leaves_of_entries, leaves_of_entries, METH_FASTCALL),
    METHOD(paired, paired, METH_O),
    METHOD(block_leaves, block_leaves, METH_FASTCALL),
    METHOD(merged_leaves, merged_leaves, METH_O),
    METHOD(piece_roots, piece_roots, METH_FASTCALL),
    METHOD(canonical, canonical, METH_O),
    METHOD(new_rows, new_rows, METH_FASTCALL),
    METHOD(event_lines, event_lines, METH_FASTCALL),
    METHOD(entries_in_copy, entries_in_copy, METH_FASTCALL),
    METHOD(rows_in_copy, rows_in_copy, METH_FASTCALL),
    METHOD(entries_in_lines, entries_in_lines, METH_FASTCALL),
    METHOD(entries_in_columns, entries_in_columns, METH_FASTCALL),
    METHOD(are_well_formed, are_well_formed, METH_FASTCALL),
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
    find_signatures();
    return find_libraries() ? PyModule_Create(&definition) : NULL;
}
