/* The work per frame: encode, check, number and seal frames, a whole batch per call. Also `look`, which waits
 * for a change in shared memory without the GIL, and `json_structure`, which checks requests of the HTTP gateway.
 *
 * tests/frame compares every function with NumPy and plain Python. `encode` returns None, with no effect, for
 * values that it does not support or that exceed a limit. ringlog/frame/layout.py defines the layout of a
 * frame; docs/reference/format.md describes it.
 *
 * Invariants:
 * - All buffers are private to the caller, except the words of `look`. Callers copy bytes out of a ring
 *   first, so no other process can change bytes after they were checked.
 * - No bytes can cause a read or write outside a buffer. Before a length is used it is compared with the
 *   bytes that are left, in 64 bits, where it cannot overflow.
 * - No function calls back into Python while it has pointers into objects.
 *
 * Only the stable ABI of Python 3.11 is used, so one library works with every later version.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sched.h>
#include <time.h>
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so is this code"
#endif

enum { W_HEAD, W_TOPIC, W_BASE_SEQ, W_COMMIT_TS, W_COUNT_EPOCH, W_PRODUCER_ID, W_PRODUCER_SEQ, W_TAIL, W_BODY, W_SEAL };
enum { HEADER_WORDS = 10, HEADER_BYTES = 80, SEALED_BYTES = 72, LEN_BYTES = 4, FRAME_LEN_MIN = HEADER_BYTES - LEN_BYTES };
enum { S_POSITION, S_FIRST_SEQ, S_COMMIT_TS, S_COUNT_STATUS, S_HEAD_SEQ, S_EPOCH, S_TOPIC, S_PRODUCER_SEQ, ENTRY_WORDS };
enum { END_LIMIT, END_CLEAN, END_PARTIAL, END_PAD, END_LEFT_OVER, END_ZERO, END_LENGTH };
/* Limits of ringlog/limits.py, in the order in which ringlog/frame/kernel.py packs them. */
enum { L_FRAME, L_SEQ, L_RECORD, L_KEY, L_TAG, L_NODE, L_META, L_HEADERS, L_HEADER_BYTES, L_HEADERS_BYTES, L_HOPS,
       LIMITS };
/* Columns after the headers in the table that `take` returns. Each has one 64-bit word per frame. */
enum { T_OFFSET, T_TOTAL, T_ACCOUNTED, T_LARGEST, T_FAULT, T_FOLLOWS, T_COLUMNS };
/* Reasons to refuse a frame from a producer, without regard to other frames: FrameFault in
 * ringlog/frame/measure.py. */
enum { FAULT_NONE, FAULT_STRUCTURE, FAULT_TEXT, FAULT_TAG, FAULT_NODE, FAULT_KEY, FAULT_META, FAULT_HEADERS,
       FAULT_PACKED = 8, FAULT_CORRUPT = 9, FAULT_UNSOUND = 10 };
/* Reasons why a header is invalid. ringlog/frame/header.py has the texts in this order. */
enum { H_SOUND, H_LENGTH, H_TYPE, H_VERSION, H_COLUMN, H_RESERVED, H_KIND, H_CODEC, H_NO_PAYLOADS, H_CONTROL, H_NO_RECORDS,
       H_RECORDS, H_RANGE, H_RAW_LEN, H_RAW_LEN_IMPOSSIBLE };
/* Reasons why a body is invalid. ringlog/frame/body.py has the texts in this order. */
enum { B_SOUND, B_OFFSETS_PAST, B_OFFSETS_FALL, B_COLUMN_PAST, B_PADDING, B_TEXT, B_LEFT_OVER, B_NULL };
/* Columns of a body. The last four are validity bitmaps of the first four; version 1 does not have them. */
enum { PAYLOAD, KEY, TAG, NODE, HEADERS, META, EVENT_TS, EXPIRES_AT, NOT_BEFORE, PRIORITY, STAMPS, VALID, COLUMNS = VALID + 4 };
enum { APPEND = 1, TYPE_MAX = 17, VERSION_FIRST = 1, VERSION = 2, CODEC_MAX = 2, COLUMNS_KNOWN = (1 << COLUMNS) - 1,
       COLUMNS_FIRST = (1 << VALID) - 1, PRODUCER_COLUMNS = COLUMNS_KNOWN & ~(1 << STAMPS) };

#define PAD_WORD 0xFFFFFFFFu
#define DURABILITY 0x03ull
#define PAYLOAD_KIND 0x30ull
#define FOLLOWS 0x80ull
#define FLAGS_SHIFT 40
#define FOLLOWS_BIT (FOLLOWS << FLAGS_SHIFT)
#define VERSION_SHIFT 40
/* Bits of word W_HEAD that all frames of one `spans` call share: version, and columns without validity. */
#define ALIKE (~0ull << VERSION_SHIFT & ~(0xFull << (COLUMNS_SHIFT + VALID)))
#define COLUMNS_SHIFT 48
#define LOW32 0xFFFFFFFFull
#define EVENT_TS_NONE INT64_MIN
#define PADDED(n) (((n) + 7) & ~(int64_t)7)
#define TEXT_COLUMNS (1 << TAG | 1 << NODE | 1 << META)

static uint64_t load(const uint8_t *at) { uint64_t word; memcpy(&word, at, 8); return word; }
static void store(uint8_t *at, uint64_t word) { memcpy(at, &word, 8); }
static uint32_t load32(const uint8_t *at) { uint32_t word; memcpy(&word, at, 4); return word; }
static void store32(uint8_t *at, uint32_t word) { memcpy(at, &word, 4); }
static int64_t total_of(const uint8_t *frame) { return (int64_t)(load(frame) & LOW32) + LEN_BYTES; }

static int are_zeros(const uint8_t *at, int64_t count)
{
    while (count-- > 0)
        if (*at++) return 0;
    return 1;
}

/* Copy the limits from the bytes that the caller passed. Returns 0 with ValueError set if their number is
 * wrong. */
static int limits_of(const char *data, Py_ssize_t length, uint64_t *limits)
{
    if (length != LIMITS * 8) {
        PyErr_Format(PyExc_ValueError, "limits must be %d bytes, got %zd", LIMITS * 8, length);
        return 0;
    }
    memcpy(limits, data, LIMITS * 8);
    return 1;
}

/* ---- headers ------------------------------------------------------------------------------------------------- */

/* Return 1 if all columns are known and every validity bitmap belongs to a column that is present. */
static int are_columns(uint64_t bitmap) { return !(bitmap & ~(uint64_t)COLUMNS_KNOWN) && !(bitmap >> VALID & ~bitmap); }

/* Return why the format version of this header does not permit it, or H_SOUND. */
static int header_fault_of(const uint8_t *header, const uint64_t *limits)
{
    uint64_t head = load(header), tail = load(header + W_TAIL * 8);
    uint64_t length = head & LOW32, type = head >> 32 & 0xFF, columns = head >> COLUMNS_SHIFT;
    uint64_t count = load(header + W_COUNT_EPOCH * 8) & LOW32, raw_len = tail & LOW32, codec = tail >> 32 & 0xFF;
    uint64_t flags = tail >> FLAGS_SHIFT & 0xFF, hops = tail >> 48, version = head >> VERSION_SHIFT & 0xFF;
    int is_append = type == APPEND;
    if (length < FRAME_LEN_MIN || (length + LEN_BYTES) & 7 || length + LEN_BYTES > limits[L_FRAME]) return H_LENGTH;
    if (type == 0 || type > TYPE_MAX) return H_TYPE;
    if (version < VERSION_FIRST || version > VERSION) return H_VERSION;
    if (!are_columns(columns) || (version == VERSION_FIRST && columns & ~(uint64_t)COLUMNS_FIRST)) return H_COLUMN;
    if (hops > limits[L_HOPS] || flags & ~(DURABILITY | PAYLOAD_KIND)) return H_RESERVED;
    if ((flags & PAYLOAD_KIND) == PAYLOAD_KIND) return H_KIND;
    if (codec > CODEC_MAX) return H_CODEC;
    if (is_append && !(columns & 1 << PAYLOAD)) return H_NO_PAYLOADS;
    if (!is_append && (columns || codec || hops)) return H_CONTROL;
    if ((count > 0) != is_append) return is_append ? H_NO_RECORDS : H_RECORDS;
    if (load(header + W_BASE_SEQ * 8) > limits[L_SEQ] + 1 - count || load(header + W_COMMIT_TS * 8) > limits[L_SEQ])
        return H_RANGE;
    if (is_append && raw_len & 7) return H_RAW_LEN;
    if (codec == 0) return (uint64_t)PADDED((int64_t)raw_len) == length - FRAME_LEN_MIN ? H_SOUND : H_RAW_LEN;
    return raw_len == 0 || raw_len > limits[L_FRAME] - HEADER_BYTES ? H_RAW_LEN_IMPOSSIBLE : H_SOUND;
}

PyDoc_STRVAR(header_faults_doc,
"header_faults(headers, limits, /)\n--\n\n"
"(n,) bytes: of each 80-byte header, 0 or why it is not one that its version allows (ringlog/frame/header.py).");

static PyObject *header_faults(PyObject *self, PyObject *args)
{
    Py_buffer headers;
    const char *given;
    Py_ssize_t given_bytes;
    uint64_t limits[LIMITS];
    if (!PyArg_ParseTuple(args, "y*y#", &headers, &given, &given_bytes)) return NULL;
    PyObject *found = NULL;
    if (limits_of(given, given_bytes, limits)) {
        Py_ssize_t count = headers.len / HEADER_BYTES;
        found = PyBytes_FromStringAndSize(NULL, count);
        char *faults = found == NULL ? NULL : PyBytes_AsString(found);
        for (Py_ssize_t i = 0; found != NULL && i < count; i++)
            faults[i] = (char)header_fault_of((const uint8_t *)headers.buf + i * HEADER_BYTES, limits);
    }
    PyBuffer_Release(&headers);
    return found;
}

/* ---- bodies -------------------------------------------------------------------------------------------------- */

/* A bytes column: `entries + 1` offsets at `offsets_at`, `data_bytes` bytes at `data_at`. Positions are byte
 * offsets from the start of the body. */
typedef struct { int64_t entries, offsets_at, data_at, data_bytes; } Span;
/* Positions of the columns in a body. The values of absent columns are undefined. */
typedef struct { Span spans[META + 1], keys, values; int64_t lists_at, fixed[COLUMNS]; } Body;

/* Return 1 if the bytes are UTF-8 as Python defines it: no overlong forms, no surrogates, nothing above
 * U+10FFFF. */
static int is_utf8(const uint8_t *at, int64_t length)
{
    const uint8_t *stop = at + length;
    while (at < stop) {
        if (stop - at >= 8 && !(load(at) & 0x8080808080808080ull)) { at += 8; continue; }
        uint8_t first = *at++;
        if (first < 0x80) continue;
        int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || stop - at < more) return 0;
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (*at < low || *at > high) return 0;
        for (int i = 1; i < more; i++)
            if ((at[i] & 0xC0) != 0x80) return 0;
        at += more;
    }
    return 1;
}

/* Check the block of offsets at *at, advance *at past it and set *last to the last offset. On a fault *at is
 * its position. */
static int pass_offsets(const uint8_t *body, int64_t length, int64_t *at, int64_t entries, int64_t *last)
{
    int64_t stop = *at + 4 * (entries + 1), past = PADDED(stop);
    if (past > length) return B_OFFSETS_PAST;
    if (!are_zeros(body + stop, past - stop)) { *at = stop; return B_PADDING; }
    const uint8_t *offsets = body + *at;
    uint32_t before = load32(offsets);
    if (before) return B_OFFSETS_FALL;
    for (int64_t i = 1; i <= entries; i++) {
        uint32_t next = load32(offsets + 4 * i);
        if (next < before || next > INT32_MAX) return B_OFFSETS_FALL;
        before = next;
    }
    *last = before;
    *at = past;
    return B_SOUND;
}

static int pass_span(const uint8_t *body, int64_t length, int64_t *at, int64_t entries, int is_text, Span *found)
{
    int64_t offsets_at = *at, size = 0;
    int fault = pass_offsets(body, length, at, entries, &size);
    if (fault) return fault;
    int64_t data_at = *at, stop = data_at + size, past = PADDED(stop);
    if (past > length) { *at = offsets_at; return B_COLUMN_PAST; }
    if (!are_zeros(body + stop, past - stop)) { *at = stop; return B_PADDING; }
    if (is_text) {
        if (!is_utf8(body + data_at, size)) return B_TEXT;
        for (int64_t i = 0; i < entries; i++) {
            uint32_t begin = load32(body + offsets_at + 4 * i);
            if (begin < size && (body[data_at + begin] & 0xC0) == 0x80) return B_TEXT;
        }
    }
    *found = (Span){entries, offsets_at, data_at, size};
    *at = past;
    return B_SOUND;
}

static int64_t length_at(const uint8_t *body, const Span *span, int64_t i)
{
    const uint8_t *at = body + span->offsets_at + 4 * i;
    return (int64_t)load32(at + 4) - load32(at);
}

/* Check the validity bitmap at `at`, one bit per record: a null has no bytes, and no bit after the last
 * record is set. */
static int pass_validity(const uint8_t *body, int64_t at, int64_t count, const Span *span)
{
    if (count & 7 && body[at + count / 8] >> (count & 7)) return B_PADDING;
    for (int64_t i = 0; i < count; i++)
        if (!(body[at + i / 8] >> (i & 7) & 1) && length_at(body, span, i)) return B_NULL;
    return B_SOUND;
}

/* Return the size in bytes of a fixed column or a validity bitmap, without padding. */
static int64_t fixed_bytes(int column, int64_t count)
{
    return column == PRIORITY ? count : column >= VALID ? (count + 7) / 8 : 8 * count;
}

/* The only decoder of bodies here: find and check every column of an uncompressed body of `count` (>= 1)
 * records. If the body is invalid, *where is the position of the fault. */
static int walk(const uint8_t *body, int64_t length, uint64_t bitmap, int64_t count, Body *found, int64_t *where)
{
    int64_t at = 0;
    int fault = B_SOUND;
    for (int column = 0; bitmap >> column && !fault; column++) {
        if (!(bitmap >> column & 1)) continue;
        if (column == HEADERS) {
            int64_t entries = 0;
            found->lists_at = at;
            fault = pass_offsets(body, length, &at, count, &entries);
            if (!fault) fault = pass_span(body, length, &at, entries, 1, &found->keys);
            if (!fault) fault = pass_span(body, length, &at, entries, 0, &found->values);
        } else if (column <= META) {
            fault = pass_span(body, length, &at, count, TEXT_COLUMNS >> column & 1, &found->spans[column]);
        } else {
            int64_t stop = at + fixed_bytes(column, count), past = PADDED(stop);
            if (past > length) {
                fault = B_COLUMN_PAST;
            } else if (!are_zeros(body + stop, past - stop)) {
                fault = B_PADDING;
                at = stop;
            } else if (column < VALID || !(fault = pass_validity(body, at, count, &found->spans[column - VALID]))) {
                found->fixed[column] = at;
                at = past;
            }
        }
    }
    *where = at;
    return fault ? fault : at == length ? B_SOUND : B_LEFT_OVER;
}

static int is_over(const uint8_t *body, const Span *span, uint64_t most)
{
    if ((uint64_t)span->data_bytes > most)
        for (int64_t i = 0; i < span->entries; i++)
            if ((uint64_t)length_at(body, span, i) > most) return 1;
    return 0;
}

/* Compute the accounted bytes of all records and of the largest record. Returns the fault of the first record
 * limit that is exceeded (order: tag, node, key, meta, headers), or FAULT_NONE. */
static int measure_body(const uint8_t *body, const Body *places, uint64_t bitmap, int64_t count, const uint64_t *limits,
                        uint64_t *accounted, uint64_t *largest)
{
    static const struct { int column, limit, fault; } LONGEST[] = {
        {TAG, L_TAG, FAULT_TAG}, {NODE, L_NODE, FAULT_NODE}, {KEY, L_KEY, FAULT_KEY}, {META, L_META, FAULT_META}};
    int has_meta = bitmap >> META & 1;
    *accounted = (uint64_t)(places->spans[PAYLOAD].data_bytes + (has_meta ? places->spans[META].data_bytes : 0));
    *largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t size = (uint64_t)length_at(body, &places->spans[PAYLOAD], i);
        if (has_meta) size += (uint64_t)length_at(body, &places->spans[META], i);
        if (size > *largest) *largest = size;
    }
    if (bitmap == 1 << PAYLOAD) return FAULT_NONE;
    for (size_t i = 0; i < sizeof LONGEST / sizeof *LONGEST; i++)
        if (bitmap >> LONGEST[i].column & 1 && is_over(body, &places->spans[LONGEST[i].column], limits[LONGEST[i].limit]))
            return LONGEST[i].fault;
    if (!(bitmap >> HEADERS & 1)) return FAULT_NONE;
    if (is_over(body, &places->keys, limits[L_HEADER_BYTES]) || is_over(body, &places->values, limits[L_HEADER_BYTES]))
        return FAULT_HEADERS;
    const uint8_t *lists = body + places->lists_at, *keys = body + places->keys.offsets_at;
    const uint8_t *values = body + places->values.offsets_at;
    for (int64_t i = 0; i < count; i++) {
        int64_t first = load32(lists + 4 * i), stop = load32(lists + 4 * (i + 1));
        uint64_t size = (uint64_t)load32(keys + 4 * stop) - load32(keys + 4 * first)
                        + load32(values + 4 * stop) - load32(values + 4 * first);
        if ((uint64_t)(stop - first) > limits[L_HEADERS] || size > limits[L_HEADERS_BYTES]) return FAULT_HEADERS;
    }
    return FAULT_NONE;
}

/* Check and measure one uncompressed body. If its structure or text is invalid, both numbers are 0. */
static int judge_body(const uint8_t *body, int64_t length, uint64_t bitmap, int64_t count, const uint64_t *limits,
                      uint64_t *accounted, uint64_t *largest)
{
    Body places;
    int64_t where;
    int fault = walk(body, length, bitmap, count, &places, &where);
    *accounted = *largest = 0;
    if (fault) return fault == B_TEXT ? FAULT_TEXT : FAULT_STRUCTURE;
    return measure_body(body, &places, bitmap, count, limits, accounted, largest);
}

PyDoc_STRVAR(walk_doc,
"walk(body, columns, count, /)\n--\n\n"
"Find and check every column of an uncompressed body of `count` records, at least one. `columns`: the bitmap.\n\n"
"Returns one tuple a column, in bit order: (offsets_at, data_at, data_bytes); for headers (lists_at, entries,\n"
"offsets_at, data_at, data_bytes of the keys, the same three of the values); for fixed ones and validity (at,). Or, where it is\n"
"no such body, (fault, where): two integers.");

static PyObject *walk_py(PyObject *self, PyObject *args)
{
    Py_buffer body;
    unsigned long long bitmap;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "y*Kn", &body, &bitmap, &count)) return NULL;
    PyObject *found = NULL;
    Body places;
    int64_t where = 0;
    if (count < 1 || !are_columns(bitmap)) {
        PyErr_Format(PyExc_ValueError, "count must be >= 1 and columns a bitmap of known columns, got %zd and %llu",
                     count, bitmap);
        goto done;
    }
    int fault = walk(body.buf, body.len, bitmap, count, &places, &where);
    if (fault) {
        found = Py_BuildValue("iL", fault, (long long)where);
        goto done;
    }
    Py_ssize_t columns = 0, next = 0;
    for (int column = 0; column < COLUMNS; column++) columns += bitmap >> column & 1;
    found = PyTuple_New(columns);
    for (int column = 0; column < COLUMNS && found != NULL; column++) {
        if (!(bitmap >> column & 1)) continue;
        PyObject *place;
        const Span *keys = &places.keys, *values = &places.values, *span = &places.spans[column <= META ? column : 0];
        if (column == HEADERS)
            place = Py_BuildValue("LLLLLLLL", (long long)places.lists_at, (long long)keys->entries,
                                  (long long)keys->offsets_at, (long long)keys->data_at, (long long)keys->data_bytes,
                                  (long long)values->offsets_at, (long long)values->data_at,
                                  (long long)values->data_bytes);
        else if (column <= META)
            place = Py_BuildValue("LLL", (long long)span->offsets_at, (long long)span->data_at,
                                  (long long)span->data_bytes);
        else
            place = Py_BuildValue("(L)", (long long)places.fixed[column]);
        if (place == NULL || PyTuple_SetItem(found, next++, place)) Py_CLEAR(found);
    }
done:
    PyBuffer_Release(&body);
    return found;
}

PyDoc_STRVAR(judge_doc,
"judge(body, columns, count, limits, /)\n--\n\n"
"(accounted bytes of all records, of the largest one, fault) of an uncompressed body; see ringlog/frame/measure.py.");

static PyObject *judge(PyObject *self, PyObject *args)
{
    Py_buffer body;
    unsigned long long bitmap;
    Py_ssize_t count, given_bytes;
    const char *given;
    uint64_t limits[LIMITS], accounted = 0, largest = 0;
    if (!PyArg_ParseTuple(args, "y*Kny#", &body, &bitmap, &count, &given, &given_bytes)) return NULL;
    PyObject *found = NULL;
    if (limits_of(given, given_bytes, limits)) {
        int fault = count < 1 || !are_columns(bitmap) || !(bitmap & 1 << PAYLOAD)
                        ? FAULT_STRUCTURE
                        : judge_body(body.buf, body.len, bitmap, count, limits, &accounted, &largest);
        found = Py_BuildValue("KKi", (unsigned long long)accounted, (unsigned long long)largest, fault);
    }
    PyBuffer_Release(&body);
    return found;
}

/* ---- many frames --------------------------------------------------------------------------------------------- */

/* Count consecutive frames from *at, at most `most`, and advance *at past them. Returns the END_ reason why
 * the scan stopped. */
static int pass_frames(const uint8_t *start, int64_t limit, int64_t *at, Py_ssize_t most, uint64_t frame_max, Py_ssize_t *count)
{
    for (*count = 0;; ++*count) {
        if (limit - *at < 8) return limit == *at ? END_CLEAN : END_LEFT_OVER;
        if (*count >= most) return END_LIMIT;
        uint64_t head = load(start + *at), length = head & LOW32, total = length + LEN_BYTES;
        if (length == 0) return head >> 32 ? END_ZERO : END_CLEAN;
        if (length == PAD_WORD) return END_PAD;
        if (length < FRAME_LEN_MIN || total & 7 || total > frame_max) return END_LENGTH;
        if ((int64_t)total > limit - *at) return END_PARTIAL;
        *at += (int64_t)total;
    }
}

PyDoc_STRVAR(scan_doc,
"scan(buffer, start, stop, frames_max, frame_max, /)\n--\n\n"
"Find the frames that lie back to back in `buffer[start:stop]`. Judges lengths only.\n\n"
"Returns (table, count, stop, end): `table` is a bytearray of `count` headers of 10 words, behind them `count` offsets\n"
"and `count` sizes, words as well; `stop` lies behind the last frame; `end` is why there are no more (batch.py).");

static PyObject *scan(PyObject *self, PyObject *args)
{
    Py_buffer view;
    Py_ssize_t from, to, most;
    unsigned long long frame_max;
    if (!PyArg_ParseTuple(args, "y*nnnK", &view, &from, &to, &most, &frame_max)) return NULL;
    PyObject *table = NULL, *found = NULL;
    if (from < 0 || from & 7 || to > view.len) {
        PyErr_Format(PyExc_ValueError, "start must be >= 0 and a multiple of 8, stop at most %zd, got %zd and %zd",
                     view.len, from, to);
        goto done;
    }
    const uint8_t *start = view.buf;
    int64_t at = from;
    Py_ssize_t count;
    int end = pass_frames(start, to, &at, most, frame_max, &count);
    table = PyByteArray_FromStringAndSize(NULL, count * (HEADER_WORDS + 2) * 8);
    if (table == NULL) goto done;
    uint8_t *row = (uint8_t *)PyByteArray_AsString(table), *offset = row + count * HEADER_BYTES, *size = offset + count * 8;
    int64_t stop = at;
    at = from;
    for (Py_ssize_t i = 0; i < count; i++, row += HEADER_BYTES) {
        int64_t total = total_of(start + at);
        memcpy(row, start + at, HEADER_BYTES);
        store(offset + i * 8, (uint64_t)at);
        store(size + i * 8, (uint64_t)total);
        at += total;
    }
    found = Py_BuildValue("OnLi", table, count, (long long)stop, end);
done:
    Py_XDECREF(table);
    PyBuffer_Release(&view);
    return found;
}

PyDoc_STRVAR(hashes_doc,
"hashes(buffer, starts, sizes, /)\n--\n\n"
"XXH3-64 of each of the ranges of `buffer` that begin at `starts`, (n,) int64, and are `sizes`, (n,) int64, long.");

static PyObject *hashes(PyObject *self, PyObject *args)
{
    Py_buffer view, starts, sizes;
    if (!PyArg_ParseTuple(args, "y*y*y*", &view, &starts, &sizes)) return NULL;
    Py_ssize_t count = starts.len / 8;
    PyObject *found = PyByteArray_FromStringAndSize(NULL, count * 8);
    uint8_t *hash = found == NULL ? NULL : (uint8_t *)PyByteArray_AsString(found);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        int64_t start = (int64_t)load((const uint8_t *)starts.buf + i * 8);
        int64_t size = i < sizes.len / 8 ? (int64_t)load((const uint8_t *)sizes.buf + i * 8) : -1;
        if (start < 0 || size < 0 || start > view.len || size > view.len - start) {
            PyErr_Format(PyExc_ValueError, "range %zd is outside the buffer of %zd bytes: start=%lld, size=%lld", i,
                         view.len, (long long)start, (long long)size);
            Py_CLEAR(found);
        } else {
            store(hash + i * 8, XXH3_64bits((const uint8_t *)view.buf + start, (size_t)size));
        }
    }
    PyBuffer_Release(&view);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&sizes);
    return found;
}

PyDoc_STRVAR(seals_doc,
"seals(headers, salt, /)\n--\n\n"
"The seal of each 80-byte header under the salt of the file that it lies in: 64-bit words.");

static PyObject *seals(PyObject *self, PyObject *args)
{
    Py_buffer headers;
    unsigned long long salt;
    if (!PyArg_ParseTuple(args, "y*K", &headers, &salt)) return NULL;
    Py_ssize_t count = headers.len / HEADER_BYTES;
    PyObject *found = PyByteArray_FromStringAndSize(NULL, count * 8);
    uint8_t *seal = found == NULL ? NULL : (uint8_t *)PyByteArray_AsString(found);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++)
        store(seal + i * 8,
              XXH3_64bits_withSeed((const uint8_t *)headers.buf + i * HEADER_BYTES, SEALED_BYTES, salt));
    PyBuffer_Release(&headers);
    return found;
}

PyDoc_STRVAR(measure_doc,
"measure(buffer, offsets, headers, limits, /)\n--\n\n"
"Three stretches of n words: of each frame accounted bytes, those of its largest record, and what is wrong with its\n"
"structure or over a limit (ringlog/frame/measure.py). `headers`: n of 80 bytes, of frames at byte `offsets`, (n,)\n"
"int64. Of control and compressed frames the caller judges the body: FAULT_PACKED.");

static PyObject *measure(PyObject *self, PyObject *args)
{
    Py_buffer view, offsets, headers;
    const char *given;
    Py_ssize_t given_bytes;
    uint64_t limits[LIMITS];
    if (!PyArg_ParseTuple(args, "y*y*y*y#", &view, &offsets, &headers, &given, &given_bytes)) return NULL;
    PyObject *found = NULL;
    Py_ssize_t count = headers.len / HEADER_BYTES;
    if (!limits_of(given, given_bytes, limits)) goto done;
    found = PyByteArray_FromStringAndSize(NULL, 3 * count * 8);
    if (found == NULL) goto done;
    uint8_t *words = (uint8_t *)PyByteArray_AsString(found);
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *header = (const uint8_t *)headers.buf + i * HEADER_BYTES;
        int64_t at = i < offsets.len / 8 ? (int64_t)load((const uint8_t *)offsets.buf + i * 8) : -1, total = total_of(header);
        uint64_t accounted = 0, largest = 0, head = load(header);
        int fault = header_fault_of(header, limits) ? FAULT_STRUCTURE : FAULT_NONE;
        if (at < 0 || at > view.len || total > view.len - at) {
            PyErr_Format(PyExc_ValueError, "frame %zd is outside the buffer of %zd bytes: offset=%lld, bytes=%lld", i,
                         view.len, (long long)at, (long long)total);
            Py_CLEAR(found);
            goto done;
        }
        if (!fault && ((head >> 32 & 0xFF) != APPEND || load(header + W_TAIL * 8) >> 32 & 0xFF))
            fault = FAULT_PACKED;
        else if (!fault)
            fault = judge_body((const uint8_t *)view.buf + at + HEADER_BYTES, total - HEADER_BYTES, head >> COLUMNS_SHIFT,
                               (int64_t)(load(header + W_COUNT_EPOCH * 8) & LOW32), limits, &accounted, &largest);
        store(words + i * 8, accounted);
        store(words + (count + i) * 8, largest);
        store(words + (2 * count + i) * 8, (uint64_t)fault);
    }
done:
    PyBuffer_Release(&view);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&headers);
    return found;
}

/* ---- admission ----------------------------------------------------------------------------------------------- */

/* Return the FAULT_ code of a frame that a producer sent, without regard to other frames. */
static int judge_frame(const uint8_t *frame, int64_t total, const uint64_t *limits, uint64_t *accounted, uint64_t *largest)
{
    uint64_t head = load(frame), tail = load(frame + W_TAIL * 8), columns = head >> COLUMNS_SHIFT;
    *accounted = *largest = 0;
    if (header_fault_of(frame, limits) || (head >> 32 & 0xFF) != APPEND || columns & ~(uint64_t)PRODUCER_COLUMNS || tail >> 48
        || load(frame + W_PRODUCER_ID * 8) == 0 || load(frame + W_PRODUCER_SEQ * 8) == 0)
        return FAULT_UNSOUND;
    if (XXH3_64bits(frame + HEADER_BYTES, (size_t)(total - HEADER_BYTES)) != load(frame + W_BODY * 8)) return FAULT_CORRUPT;
    if (tail >> 32 & 0xFF) return FAULT_PACKED;
    return judge_body(frame + HEADER_BYTES, total - HEADER_BYTES, columns, (int64_t)(load(frame + W_COUNT_EPOCH * 8) & LOW32),
                      limits, accounted, largest);
}

/* Return 1 if frame `b` continues the run of frame `a`: same topic, epoch, producer, claim and durability
 * class, and the next producer_seq. Until the shard numbers a frame, W_BASE_SEQ contains the claim. */
static int goes_on(const uint8_t *a, const uint8_t *b)
{
    return load(a + W_TOPIC * 8) == load(b + W_TOPIC * 8) && load(a + W_PRODUCER_ID * 8) == load(b + W_PRODUCER_ID * 8)
        && load(a + W_COUNT_EPOCH * 8) >> 32 == load(b + W_COUNT_EPOCH * 8) >> 32
        && load(a + W_BASE_SEQ * 8) == load(b + W_BASE_SEQ * 8)
        && ((load(a + W_TAIL * 8) ^ load(b + W_TAIL * 8)) >> FLAGS_SHIFT & DURABILITY) == 0
        && load(a + W_PRODUCER_SEQ * 8) + 1 == load(b + W_PRODUCER_SEQ * 8);
}

typedef struct { Py_ssize_t start; int fault, equal_counts; uint64_t records, bytes, largest, most, columns; } Run;

static int add_run(PyObject *runs, const Run *run, Py_ssize_t stop)
{
    PyObject *row = Py_BuildValue("nniKKKKiK", run->start, stop, run->fault, (unsigned long long)run->records,
                                  (unsigned long long)run->bytes, (unsigned long long)run->largest,
                                  (unsigned long long)run->most, run->equal_counts, (unsigned long long)run->columns);
    int failed = row == NULL || PyList_Append(runs, row);
    Py_XDECREF(row);
    return !failed;
}

PyDoc_STRVAR(take_doc,
"take(buffer, frames_max, position, limits, /)\n--\n\n"
"Find, lift and check the frames that lie back to back from the buffer's beginning, as producers send them. Their flag\n"
"FOLLOWS is taken off, in headers and buffer.\n\n"
"Returns (table, entries, count, stop, end, follows, runs). `table`: a bytearray of `count` rows of 10 words, the\n"
"headers, behind them stretches of `count` words: offsets, sizes, accounted bytes, largest records, faults, FOLLOWS.\n"
"`entries`: a bytearray of `count` rows of 8 words with position (`position` is that of the buffer's first byte), topic\n"
"and producer_seq. `stop`, `end`: as in scan. `follows`: FOLLOWS was on one. `runs`: a list of (start, stop, fault,\n"
"records, bytes, largest, records_max, equal_counts, columns). A run is one frame, or sound ones of one topic, epoch,\n"
"producer, claim and class, with numbers that follow each other; `columns` are those that any of it has.");

static PyObject *take(PyObject *self, PyObject *args)
{
    Py_buffer view;
    Py_ssize_t most, given_bytes, count;
    unsigned long long position;
    const char *given;
    uint64_t limits[LIMITS];
    if (!PyArg_ParseTuple(args, "w*nKy#", &view, &most, &position, &given, &given_bytes)) return NULL;
    PyObject *table = NULL, *entries = NULL, *runs = NULL, *found = NULL;
    if (!limits_of(given, given_bytes, limits)) goto done;
    uint8_t *start = view.buf;
    int64_t stop = 0, at = 0;
    int end = pass_frames(start, view.len, &stop, most, limits[L_FRAME], &count), follows = 0;
    table = PyByteArray_FromStringAndSize(NULL, count * (HEADER_WORDS + T_COLUMNS) * 8);
    entries = PyByteArray_FromStringAndSize(NULL, count * ENTRY_WORDS * 8);
    runs = PyList_New(0);
    if (table == NULL || entries == NULL || runs == NULL) goto done;
    uint8_t *entry = (uint8_t *)PyByteArray_AsString(entries), *row = (uint8_t *)PyByteArray_AsString(table);
    uint8_t *columns = row + count * HEADER_BYTES;
    memset(entry, 0, (size_t)count * ENTRY_WORDS * 8);
    Run run = {0};
    for (Py_ssize_t i = 0; i < count; i++, row += HEADER_BYTES, entry += ENTRY_WORDS * 8) {
        uint8_t *frame = start + at;
        int64_t total = total_of(frame);
        uint64_t accounted, largest, tail = load(frame + W_TAIL * 8), flag = tail & FOLLOWS_BIT;
        if (flag) {
            follows = 1;
            store(frame + W_TAIL * 8, tail ^ flag);
        }
        memcpy(row, frame, HEADER_BYTES);
        int fault = judge_frame(frame, total, limits, &accounted, &largest);
        uint64_t held = load(row + W_COUNT_EPOCH * 8) & LOW32;
        store(columns + (T_OFFSET * count + i) * 8, (uint64_t)at);
        store(columns + (T_TOTAL * count + i) * 8, (uint64_t)total);
        store(columns + (T_ACCOUNTED * count + i) * 8, accounted);
        store(columns + (T_LARGEST * count + i) * 8, largest);
        store(columns + (T_FAULT * count + i) * 8, (uint64_t)fault);
        store(columns + (T_FOLLOWS * count + i) * 8, flag != 0);
        store(entry + S_POSITION * 8, position + (uint64_t)at);
        store(entry + S_TOPIC * 8, load(row + W_TOPIC * 8));
        store(entry + S_PRODUCER_SEQ * 8, load(row + W_PRODUCER_SEQ * 8));
        if (i && (fault || run.fault || !goes_on(row - HEADER_BYTES, row))) {
            if (!add_run(runs, &run, i)) goto done;
            run = (Run){.start = i};
        }
        if (i == run.start) run = (Run){.start = i, .fault = fault, .equal_counts = 1, .most = held};
        run.equal_counts &= held == run.most;
        if (held > run.most) run.most = held;
        if (largest > run.largest) run.largest = largest;
        run.records += held;
        run.bytes += accounted;
        run.columns |= load(row) >> COLUMNS_SHIFT;
        at += total;
    }
    if (count && !add_run(runs, &run, count)) goto done;
    found = Py_BuildValue("OOnLiiO", table, entries, count, (long long)stop, end, follows, runs);
done:
    Py_XDECREF(table);
    Py_XDECREF(entries);
    Py_XDECREF(runs);
    PyBuffer_Release(&view);
    return found;
}

/* ---- spans --------------------------------------------------------------------------------------------------- */

static void lay_span(const uint8_t *body, int64_t base, const Span *span, uint8_t *starts, uint8_t *stops)
{
    for (int64_t i = 0; i < span->entries; i++) {
        const uint8_t *at = body + span->offsets_at + 4 * i;
        store(starts + 8 * i, (uint64_t)(base + span->data_at + load32(at)));
        store(stops + 8 * i, (uint64_t)(base + span->data_at + load32(at + 4)));
    }
}

PyDoc_STRVAR(spans_doc,
"spans(buffer, offsets, headers, /)\n--\n\n"
"Where every value lies of uncompressed frames of one version with the same columns, at byte `offsets`, (n,) int64.\n"
"Some may have nulls in a column, and others none.\n\n"
"Returns (table, records, entries). `table`: stretches of `records` words: seqs, stamps, rows of the frames; then of\n"
"each column, in bit order, starts and stops in the buffer (of headers: which entries are a record's), or values, of\n"
"validity 1 or 0. Then\n"
"stretches of `entries` words: starts and stops of keys and of values of headers. Or, where one is no such frame,\n"
"(fault, row): two integers.");

static PyObject *spans(PyObject *self, PyObject *args)
{
    Py_buffer view, offsets, headers;
    if (!PyArg_ParseTuple(args, "y*y*y*", &view, &offsets, &headers)) return NULL;
    Py_ssize_t count = headers.len / HEADER_BYTES;
    const uint8_t *start = view.buf, *rows = headers.buf, *places = offsets.buf;
    int64_t records = 0, entries = 0, where;
    PyObject *found = NULL, *table = NULL;
    Body body;
    if (count < 1 || offsets.len / 8 < count) {
        PyErr_Format(PyExc_ValueError, "headers must have a row, and offsets one entry per row, got %zd and %zd", count,
                     offsets.len / 8);
        goto done;
    }
    uint64_t shape = load(rows) & ALIKE, bitmap = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *row = rows + i * HEADER_BYTES;
        int64_t at = (int64_t)load(places + i * 8), total = total_of(row), held = (int64_t)(load(row + W_COUNT_EPOCH * 8) & LOW32);
        uint64_t own = load(row) >> COLUMNS_SHIFT;
        if (at < 0 || at > view.len || total < HEADER_BYTES || total > view.len - at || (load(row) & ALIKE) != shape
            || !are_columns(own) || held < 1 || 4 * held > total) {
            PyErr_Format(PyExc_ValueError, "frame %zd is outside the buffer of %zd bytes, or differs in version or "
                         "columns: offset=%lld, bytes=%lld, records=%lld", i, view.len, (long long)at,
                         (long long)total, (long long)held);
            goto done;
        }
        records += held;
        bitmap |= own;
        if (!(own >> HEADERS & 1)) continue;
        int fault = walk(start + at + HEADER_BYTES, total - HEADER_BYTES, own, held, &body, &where);
        if (fault) {
            found = Py_BuildValue("in", fault, i);
            goto done;
        }
        entries += body.keys.entries;
    }
    int words = 3;
    for (int column = 0; column < COLUMNS; column++)
        if (bitmap >> column & 1) words += column <= META ? 2 : 1;
    table = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(8 * (words * records + 4 * entries)));
    if (table == NULL) goto done;
    uint8_t *out = (uint8_t *)PyByteArray_AsString(table), *tail = out + 8 * words * records;
    int64_t before = 0, earlier = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint8_t *row = rows + i * HEADER_BYTES;
        int64_t at = (int64_t)load(places + i * 8) + HEADER_BYTES, held = (int64_t)(load(row + W_COUNT_EPOCH * 8) & LOW32);
        const uint8_t *columns = start + at;
        uint64_t own = load(row) >> COLUMNS_SHIFT;
        int fault = walk(columns, total_of(row) - HEADER_BYTES, own, held, &body, &where);
        if (fault) {
            found = Py_BuildValue("in", fault, i);
            goto done;
        }
        uint8_t *seqs = out + 8 * before, *stamps = seqs + 8 * records, *frames = stamps + 8 * records;
        uint64_t seq = load(row + W_BASE_SEQ * 8), stamp = load(row + W_COMMIT_TS * 8);
        for (int64_t k = 0; k < held; k++) {
            store(seqs + 8 * k, seq + (uint64_t)k);
            store(stamps + 8 * k, stamp);
            store(frames + 8 * k, (uint64_t)i);
        }
        uint8_t *next = frames + 8 * records;
        for (int column = 0; bitmap >> column; column++) {
            if (!(bitmap >> column & 1)) continue;
            if (column == HEADERS) {
                for (int64_t k = 0; k < held; k++) {
                    store(next + 8 * k, (uint64_t)earlier + load32(columns + body.lists_at + 4 * k));
                    store(next + 8 * (records + k), (uint64_t)earlier + load32(columns + body.lists_at + 4 * k + 4));
                }
                uint8_t *keys = tail + 8 * earlier;
                lay_span(columns, at, &body.keys, keys, keys + 8 * entries);
                lay_span(columns, at, &body.values, keys + 16 * entries, keys + 24 * entries);
                earlier += body.keys.entries;
                next += 16 * records;
            } else if (column <= META) {
                lay_span(columns, at, &body.spans[column], next, next + 8 * records);
                next += 16 * records;
            } else if (column == PRIORITY) {
                for (int64_t k = 0; k < held; k++) store(next + 8 * k, columns[body.fixed[column] + k]);
                next += 8 * records;
            } else if (column >= VALID) {
                const uint8_t *bits = own >> column & 1 ? columns + body.fixed[column] : NULL;
                for (int64_t k = 0; k < held; k++) store(next + 8 * k, bits == NULL ? 1 : bits[k / 8] >> (k & 7) & 1);
                next += 8 * records;
            } else {
                memcpy(next, columns + body.fixed[column], (size_t)(8 * held));
                next += 8 * records;
            }
        }
        before += held;
    }
    found = Py_BuildValue("OLL", table, (long long)records, (long long)entries);
done:
    Py_XDECREF(table);
    PyBuffer_Release(&view);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&headers);
    return found;
}

/* ---- encoding ------------------------------------------------------------------------------------------------ */

/* An input column of `encode`: `values`, where a null has data NULL, or the `numbers` of a fixed column. */
typedef struct { const char *data; int64_t length; } Value;
typedef struct { Value *values; uint8_t *numbers; int64_t nulls; int is_there; } Column;
enum { FEW = 8 }; /* Up to this many payloads need no allocation. */

/* Read `count` values from a tuple (data, (count + 1,) int64 offsets into it, None or (count,) bytes, 0 for a
 * null). Returns 0 if the tuple has another form, possibly with a Python error set. The caller releases the
 * buffers. */
static int values_of_buffer(PyObject *given, Py_ssize_t count, Value *values, Py_buffer *held, Py_ssize_t *buffers,
                            int64_t *nulls)
{
    if (PyTuple_Size(given) != 3) return 0;
    int has_nulls = PyTuple_GetItem(given, 2) != Py_None;
    for (Py_ssize_t i = 0; i < 2 + has_nulls; i++, ++*buffers)
        if (PyObject_GetBuffer(PyTuple_GetItem(given, i), &held[*buffers], PyBUF_SIMPLE)) return 0;
    const Py_buffer *data = &held[*buffers - 2 - has_nulls], *offsets = data + 1, *valid = data + 2;
    if (offsets->len != (count + 1) * 8 || (has_nulls && valid->len != count)) return 0;
    int64_t before = (int64_t)load(offsets->buf);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t next = (int64_t)load((const uint8_t *)offsets->buf + 8 * (i + 1));
        if (before < 0 || next < before || next > data->len) return 0;
        values[i] = (Value){data->buf == NULL ? "" : (const char *)data->buf + before, next - before};
        if (has_nulls && !((const uint8_t *)valid->buf)[i]) {
            values[i] = (Value){NULL, 0};
            ++*nulls;
        }
        before = next;
    }
    return 1;
}

static int value_of(PyObject *item, int is_text, Value *value)
{
    Py_ssize_t length;
    char *data;
    if (is_text) {
        const char *text = PyUnicode_Check(item) ? PyUnicode_AsUTF8AndSize(item, &length) : NULL;
        if (text == NULL) return 0;
        *value = (Value){text, length};
    } else {
        if (PyBytes_AsStringAndSize(item, &data, &length)) return 0;
        *value = (Value){data, length};
    }
    return 1;
}

/* Read `count` values from a list of bytes, or of str if `is_text`; None is a null. Returns 0 for any other
 * item. */
static int values_of_list(PyObject *list, Py_ssize_t count, int is_text, Value *values, int64_t *nulls)
{
    if (PyList_Size(list) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (item == Py_None) {
            values[i] = (Value){NULL, 0};
            ++*nulls;
        } else if (!value_of(item, is_text, &values[i])) {
            return 0;
        }
    }
    return 1;
}

static int numbers_of(PyObject *given, Py_ssize_t count, int column, uint8_t *numbers)
{
    int width = column == PRIORITY ? 1 : 8;
    if (!PyList_Check(given)) {
        Py_buffer view;
        if (!PyMemoryView_Check(given) || PyObject_GetBuffer(given, &view, PyBUF_SIMPLE)) return 0;
        int fits = view.len == count * width;
        if (fits) memcpy(numbers, view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
        return fits;
    }
    if (PyList_Size(given) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(given, i);
        int64_t number = column == EVENT_TS ? EVENT_TS_NONE : 0;
        if (item != Py_None) {
            if (!PyLong_CheckExact(item)) return 0;
            number = PyLong_AsLongLong(item);
            if (number == -1 && PyErr_Occurred()) return 0;
            if ((number < 0 && column != EVENT_TS) || (column == PRIORITY && number > UINT8_MAX)) return 0;
        }
        if (column == PRIORITY) numbers[i] = (uint8_t)number;
        else store(numbers + 8 * i, (uint64_t)number);
    }
    return 1;
}

/* Count the header entries of a list of None, dict of str to bytes, or list or tuple of pairs. ends[i]
 * becomes the number of entries of records 0 to i. Returns the total, or -1 for another form. */
static int64_t entries_of(PyObject *list, Py_ssize_t count, int64_t *ends)
{
    int64_t entries = 0;
    if (PyList_Size(list) != count) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (PyDict_CheckExact(item)) entries += PyDict_Size(item);
        else if (PyList_Check(item)) entries += PyList_Size(item);
        else if (PyTuple_Check(item)) entries += PyTuple_Size(item);
        else if (item != Py_None) return -1;
        ends[i] = entries;
    }
    return entries;
}

static int pairs_of(PyObject *list, Py_ssize_t count, Value *keys, Value *values)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i), *key, *value;
        Py_ssize_t at = 0;
        if (PyDict_CheckExact(item)) {
            while (PyDict_Next(item, &at, &key, &value))
                if (!value_of(key, 1, keys++) || !value_of(value, 0, values++)) return 0;
            continue;
        }
        Py_ssize_t held = item == Py_None ? 0 : PyList_Check(item) ? PyList_Size(item) : PyTuple_Size(item);
        for (; at < held; at++) {
            PyObject *pair = PyList_Check(item) ? PyList_GetItem(item, at) : PyTuple_GetItem(item, at);
            if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2 || !value_of(PyTuple_GetItem(pair, 0), 1, keys++)
                || !value_of(PyTuple_GetItem(pair, 1), 0, values++))
                return 0;
        }
    }
    return 1;
}

static int64_t bytes_of(const Value *values, int64_t start, int64_t stop)
{
    int64_t size = 0;
    for (; start < stop; start++) size += values[start].length;
    return size;
}

static uint8_t *lay_zeros(uint8_t *at, uint8_t *stop)
{
    while (at < stop) *at++ = 0;
    return stop;
}

static uint8_t *lay_values(uint8_t *at, const Value *values, int64_t count)
{
    uint8_t *data = at + PADDED(4 * (count + 1)), *next = data;
    store(data - 8, 0); /* clears the padding after the offsets, if there is any */
    store32(at, 0);
    for (int64_t i = 0; i < count;) {
        /* Values that are contiguous in memory, such as those of a buffer, are copied with one memcpy. */
        const char *from = values[i].data;
        int64_t size = 0;
        do {
            size += values[i].length;
            store32(at + 4 * ++i, (uint32_t)(next - data + size));
        } while (i < count && values[i].data == from + size);
        if (size) memcpy(next, from, (size_t)size);
        next += size;
    }
    return lay_zeros(next, data + PADDED(next - data));
}

static uint8_t *lay_validity(uint8_t *at, const Value *values, int64_t count)
{
    int64_t size = PADDED(fixed_bytes(VALID, count));
    memset(at, 0, (size_t)size);
    for (int64_t i = 0; i < count; i++)
        if (values[i].data != NULL) at[i / 8] |= (uint8_t)(1 << (i & 7));
    return at + size;
}

static int64_t laid_bytes(int64_t entries, int64_t data) { return PADDED(4 * (entries + 1)) + PADDED(data); }

/* Return the validity bits of the columns that have a null among the values [start, stop). */
static uint64_t nulls_among(const Column *columns, int64_t start, int64_t stop)
{
    uint64_t found = 0;
    if (!(columns[PAYLOAD].nulls | columns[KEY].nulls | columns[TAG].nulls | columns[NODE].nulls)) return 0;
    for (int column = PAYLOAD; column <= NODE; column++)
        for (int64_t i = start; columns[column].nulls && i < stop; i++)
            if (columns[column].values[i].data == NULL) {
                found |= 1ull << (VALID + column);
                break;
            }
    return found;
}

PyDoc_STRVAR(encode_doc,
"encode(columns, count, records, header, total_max, limits, /)\n--\n\n"
"Frames of `records` records each, of `count` in all, the last one perhaps smaller, back to back.\n\n"
"`columns`: a tuple, by bit, without those behind the last, of None or: a list of bytes, for tag and node of str, None\n"
"for a null; or (data, offsets, valid): a buffer, (count + 1,) int64 places in it, None or (count,) bytes, 0 for a null.\n"
"Metadata that is null is empty. Headers: a list of None, dict of str to bytes, or list or tuple of pairs; or\n"
"((count + 1,) int64, keys, values), both as (data, offsets, None). Numbers: a list of int or None, or a\n"
"memoryview of int64, of priorities uint8. `header`: 80 bytes, of which columns, count, lengths, checksum and (from its\n"
"value on) producer_seq are filled in.\n\n"
"Returns (bytearray, bytes of (frames + 1,) int64 offsets), or None where a value is not of these types or a limit is\n"
"exceeded: then ringlog/frame/columns.py says which.");

static PyObject *encode(PyObject *self, PyObject *args)
{
    PyObject *given, *buffer = NULL, *offsets = NULL, *found = NULL;
    Py_ssize_t count, records, header_bytes, limit_bytes, buffers = 0;
    long long total_max;
    const char *header, *limit_words;
    uint64_t limits[LIMITS];
    Column columns[STAMPS] = {{0}};
    Value few[FEW];
    Py_buffer held[3 * META + 10];
    int64_t *ends = NULL, entries = 0, total = 0, nulls_of_headers = 0;
    Value *keys = NULL, *values = NULL;
    static const int LONGEST[STAMPS] = {[KEY] = L_KEY, [TAG] = L_TAG, [NODE] = L_NODE, [META] = L_META};
    if (!PyArg_ParseTuple(args, "O!nny#Ly#", &PyTuple_Type, &given, &count, &records, &header, &header_bytes, &total_max,
                          &limit_words, &limit_bytes) || !limits_of(limit_words, limit_bytes, limits))
        return NULL;
    Py_ssize_t sources = PyTuple_Size(given);
    if (header_bytes != HEADER_BYTES || sources < 1 || sources > STAMPS || total_max > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "header must be %d bytes, columns 1 to %d entries, total_max at most %d, "
                     "got %zd, %zd and %lld", HEADER_BYTES, STAMPS, INT32_MAX, header_bytes, sources, total_max);
        return NULL;
    }
    if (count < 1 || records < 1 || count > INT32_MAX || records > INT32_MAX) Py_RETURN_NONE;
    uint64_t bitmap = 0;
    for (int column = 0; column < sources; column++) {
        PyObject *source = PyTuple_GetItem(given, column);
        if (source == Py_None) continue;
        bitmap |= 1ull << column;
        columns[column].is_there = 1;
        if (column == HEADERS) {
            ends = PyMem_Malloc((size_t)count * sizeof *ends);
            if (ends == NULL) goto no_memory;
            if (PyTuple_Check(source)) {
                Py_buffer *lists = &held[buffers];
                if (PyTuple_Size(source) != 3 || PyObject_GetBuffer(PyTuple_GetItem(source, 0), lists, PyBUF_SIMPLE)) goto none;
                buffers++;
                if (lists->len != (count + 1) * 8 || load(lists->buf)) goto none;
                for (Py_ssize_t i = 0; i < count; i++) {
                    ends[i] = (int64_t)load((const uint8_t *)lists->buf + 8 * (i + 1));
                    if (ends[i] < (i ? ends[i - 1] : 0) || ends[i] > INT32_MAX) goto none;
                }
                entries = ends[count - 1];
            } else if (!PyList_Check(source) || (entries = entries_of(source, count, ends)) < 0) {
                goto none;
            }
            keys = PyMem_Malloc((size_t)(entries + 1) * sizeof *keys);
            values = PyMem_Malloc((size_t)(entries + 1) * sizeof *values);
            if (keys == NULL || values == NULL) goto no_memory;
            if (PyList_Check(source)) {
                if (!pairs_of(source, count, keys, values)) goto none;
                continue;
            }
            PyObject *of_keys = PyTuple_GetItem(source, 1), *of_values = PyTuple_GetItem(source, 2);
            if (!PyTuple_Check(of_keys) || !PyTuple_Check(of_values)
                || !values_of_buffer(of_keys, (Py_ssize_t)entries, keys, held, &buffers, &nulls_of_headers)
                || !values_of_buffer(of_values, (Py_ssize_t)entries, values, held, &buffers, &nulls_of_headers)
                || nulls_of_headers)
                goto none;
        } else if (column > META) {
            columns[column].numbers = PyMem_Malloc((size_t)count * 8);
            if (columns[column].numbers == NULL) goto no_memory;
            if (!numbers_of(source, count, column, columns[column].numbers)) goto none;
        } else {
            int is_few = column == PAYLOAD && count <= FEW;
            Value *items = columns[column].values = is_few ? few : PyMem_Malloc((size_t)count * sizeof *items);
            if (items == NULL) goto no_memory;
            int is_text = column == TAG || column == NODE;
            int64_t *nulls = &columns[column].nulls;
            if (PyTuple_Check(source) ? !values_of_buffer(source, count, items, held, &buffers, nulls)
                                      : !PyList_Check(source) || !values_of_list(source, count, is_text, items, nulls))
                goto none;
            if (LONGEST[column])
                for (Py_ssize_t i = 0; i < count; i++)
                    if ((uint64_t)items[i].length > limits[LONGEST[column]]) goto none;
        }
    }
    if (!columns[PAYLOAD].is_there) goto none;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t size = columns[PAYLOAD].values[i].length + (columns[META].is_there ? columns[META].values[i].length : 0);
        if ((uint64_t)size > limits[L_RECORD]) goto none;
        if (!columns[HEADERS].is_there) continue;
        int64_t first = i ? ends[i - 1] : 0;
        if ((uint64_t)(ends[i] - first) > limits[L_HEADERS]
            || (uint64_t)(bytes_of(keys, first, ends[i]) + bytes_of(values, first, ends[i])) > limits[L_HEADERS_BYTES])
            goto none;
        for (int64_t k = first; k < ends[i]; k++)
            if ((uint64_t)keys[k].length > limits[L_HEADER_BYTES] || (uint64_t)values[k].length > limits[L_HEADER_BYTES])
                goto none;
    }
    Py_ssize_t frames = (count + records - 1) / records;
    offsets = PyBytes_FromStringAndSize(NULL, (frames + 1) * 8);
    if (offsets == NULL) goto done;
    uint8_t *places = (uint8_t *)PyBytes_AsString(offsets);
    for (Py_ssize_t frame = 0, i = 0; frame < frames; frame++) {
        store(places + frame * 8, (uint64_t)total);
        Py_ssize_t stop = i + records < count ? i + records : count, size = stop - i;
        total += HEADER_BYTES;
        for (int column = 0; column < STAMPS; column++) {
            if (!columns[column].is_there) continue;
            if (column == HEADERS) {
                int64_t first = i ? ends[i - 1] : 0, last = ends[stop - 1];
                total += PADDED(4 * ((int64_t)size + 1)) + laid_bytes(last - first, bytes_of(keys, first, last))
                         + laid_bytes(last - first, bytes_of(values, first, last));
            } else if (column > META) {
                total += PADDED(fixed_bytes(column, size));
            } else {
                total += laid_bytes(size, bytes_of(columns[column].values, i, stop));
            }
        }
        for (uint64_t nulls = nulls_among(columns, i, stop); nulls; nulls &= nulls - 1) total += PADDED(fixed_bytes(VALID, size));
        if (total > total_max) goto none;
        i = stop;
    }
    store(places + frames * 8, (uint64_t)total);
    buffer = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (buffer == NULL) goto done;
    uint8_t *at = (uint8_t *)PyByteArray_AsString(buffer);
    uint64_t seq = load((const uint8_t *)header + W_PRODUCER_SEQ * 8);
    for (Py_ssize_t frame = 0, i = 0; frame < frames; frame++) {
        Py_ssize_t stop = i + records < count ? i + records : count;
        int64_t size = (int64_t)(load(places + frame * 8 + 8) - load(places + frame * 8)), held_records = stop - i;
        uint64_t nulls = nulls_among(columns, i, stop), there = bitmap | nulls;
        uint8_t *next = at + HEADER_BYTES;
        memcpy(at, header, HEADER_BYTES);
        store(at + W_HEAD * 8, (load(at + W_HEAD * 8) & ~LOW32) | (uint64_t)(size - LEN_BYTES) | there << COLUMNS_SHIFT);
        store(at + W_COUNT_EPOCH * 8, (load(at + W_COUNT_EPOCH * 8) & ~LOW32) | (uint64_t)held_records);
        store(at + W_PRODUCER_SEQ * 8, seq + (uint64_t)frame);
        store(at + W_TAIL * 8, (load(at + W_TAIL * 8) & ~LOW32) | (uint64_t)(size - HEADER_BYTES));
        for (int column = 0; column < STAMPS; column++) {
            if (!columns[column].is_there) continue;
            if (column == HEADERS) {
                int64_t first = i ? ends[i - 1] : 0, last = ends[stop - 1];
                uint8_t *lists = next;
                next += PADDED(4 * (held_records + 1));
                store(next - 8, 0);
                store32(lists, 0);
                for (Py_ssize_t k = i; k < stop; k++) store32(lists + 4 * (k - i + 1), (uint32_t)(ends[k] - first));
                next = lay_values(next, keys + first, last - first);
                next = lay_values(next, values + first, last - first);
            } else if (column > META) {
                int64_t bytes = fixed_bytes(column, held_records);
                memcpy(next, columns[column].numbers + fixed_bytes(column, i), (size_t)bytes);
                next = lay_zeros(next + bytes, next + PADDED(bytes));
            } else {
                next = lay_values(next, columns[column].values + i, held_records);
            }
        }
        for (int column = PAYLOAD; nulls >> (VALID + column); column++)
            if (nulls >> (VALID + column) & 1) next = lay_validity(next, columns[column].values + i, held_records);
        store(at + W_BODY * 8, XXH3_64bits(at + HEADER_BYTES, (size_t)(size - HEADER_BYTES)));
        at += size;
        i = stop;
    }
    found = PyTuple_Pack(2, buffer, offsets);
    goto done;
no_memory:
    PyErr_NoMemory();
    goto done;
none:
    PyErr_Clear();
    found = Py_NewRef(Py_None);
done:
    for (int column = 0; column < STAMPS; column++) {
        if (columns[column].values != few) PyMem_Free(columns[column].values);
        PyMem_Free(columns[column].numbers);
    }
    PyMem_Free(ends);
    PyMem_Free(keys);
    PyMem_Free(values);
    while (buffers > 0) PyBuffer_Release(&held[--buffers]);
    Py_XDECREF(buffer);
    Py_XDECREF(offsets);
    return found;
}

/* ---- numbering and sealing ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(number_doc,
"number(words, entries, start, stop, first, stamp, epoch, durability, /)\n--\n\n"
"Give rows [start, stop) of `words`, (n, 10) uint64, numbers from `first` on, stamp, epoch and class, and note them in\n"
"the same rows of `entries`, (n, 8) uint64. Returns the number behind the last record.");

static PyObject *number(PyObject *self, PyObject *args)
{
    Py_buffer words, entries;
    Py_ssize_t start, stop;
    unsigned long long first, stamp, epoch, durability;
    if (!PyArg_ParseTuple(args, "w*w*nnKKKK", &words, &entries, &start, &stop, &first, &stamp, &epoch, &durability))
        return NULL;
    PyObject *found = NULL;
    if (start < 0 || start > stop || stop > words.len / HEADER_BYTES || stop > entries.len / (ENTRY_WORDS * 8)) {
        PyErr_Format(PyExc_ValueError, "rows [%zd, %zd) are outside of words (%zd rows) or entries (%zd rows)", start,
                     stop, words.len / HEADER_BYTES, entries.len / (ENTRY_WORDS * 8));
        goto done;
    }
    uint64_t next = first;
    for (Py_ssize_t i = start; i < stop; i++) {
        uint8_t *row = (uint8_t *)words.buf + i * HEADER_BYTES, *entry = (uint8_t *)entries.buf + i * ENTRY_WORDS * 8;
        uint64_t count = load(row + W_COUNT_EPOCH * 8) & LOW32, tail = load(row + W_TAIL * 8);
        store(row + W_BASE_SEQ * 8, next);
        store(row + W_COMMIT_TS * 8, stamp);
        store(row + W_COUNT_EPOCH * 8, count | epoch << 32);
        store(row + W_TAIL * 8, (tail & ~(DURABILITY << FLAGS_SHIFT)) | (durability & DURABILITY) << FLAGS_SHIFT);
        store(entry + S_FIRST_SEQ * 8, next);
        store(entry + S_COMMIT_TS * 8, stamp);
        store(entry + S_COUNT_STATUS * 8, count);
        store(entry + S_EPOCH * 8, epoch);
        next += count;
    }
    for (Py_ssize_t i = start; i < stop; i++)
        store((uint8_t *)entries.buf + (i * ENTRY_WORDS + S_HEAD_SEQ) * 8, next - 1);
    found = PyLong_FromUnsignedLongLong(next);
done:
    PyBuffer_Release(&words);
    PyBuffer_Release(&entries);
    return found;
}

PyDoc_STRVAR(seal_doc,
"seal(buffer, offsets, words, start, stop, salt, /)\n--\n\n"
"Seal the headers in rows [start, stop) of `words`, (n, 10) uint64, and write them over those that lie in `buffer` at\n"
"byte `offsets`, (n,) int64. Returns the last seal.");

static PyObject *seal(PyObject *self, PyObject *args)
{
    Py_buffer buffer, offsets, words;
    Py_ssize_t start, stop;
    unsigned long long salt;
    if (!PyArg_ParseTuple(args, "w*y*w*nnK", &buffer, &offsets, &words, &start, &stop, &salt)) return NULL;
    PyObject *found = NULL;
    if (start < 0 || start >= stop || stop > words.len / HEADER_BYTES || stop > offsets.len / 8) goto outside;
    uint64_t last = 0;
    for (Py_ssize_t i = start; i < stop; i++) {
        uint8_t *row = (uint8_t *)words.buf + i * HEADER_BYTES;
        int64_t at = (int64_t)load((const uint8_t *)offsets.buf + i * 8);
        if (at < 0 || at > buffer.len - HEADER_BYTES) goto outside;
        last = XXH3_64bits_withSeed(row, SEALED_BYTES, salt);
        store(row + W_SEAL * 8, last);
        memcpy((uint8_t *)buffer.buf + at, row, HEADER_BYTES);
    }
    found = PyLong_FromUnsignedLongLong(last);
    goto done;
outside:
    PyErr_Format(PyExc_ValueError, "rows [%zd, %zd) are empty or outside of words, offsets or buffer", start, stop);
done:
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&words);
    return found;
}

PyDoc_STRVAR(seal_at_doc,
"seal_at(buffer, offset, salt, /)\n--\n\n"
"Seal the header at byte `offset` of `buffer`; returns the seal.");

static PyObject *seal_at(PyObject *self, PyObject *args)
{
    Py_buffer buffer;
    Py_ssize_t offset;
    unsigned long long salt;
    if (!PyArg_ParseTuple(args, "w*nK", &buffer, &offset, &salt)) return NULL;
    PyObject *found = NULL;
    if (offset < 0 || offset > buffer.len - HEADER_BYTES) {
        PyErr_Format(PyExc_ValueError, "header at offset %zd is outside the buffer of %zd bytes", offset, buffer.len);
    } else {
        uint8_t *header = (uint8_t *)buffer.buf + offset;
        uint64_t made = XXH3_64bits_withSeed(header, SEALED_BYTES, salt);
        store(header + W_SEAL * 8, made);
        found = PyLong_FromUnsignedLongLong(made);
    }
    PyBuffer_Release(&buffer);
    return found;
}

PyDoc_STRVAR(control_doc,
"control(type, topic_id, base_seq, commit_ts, epoch, flags, body, /)\n--\n\n"
"A control frame around `body`, padded, as a bytearray; it is not sealed. Raises OverflowError for a number that does\n"
"not fit its field.");

static PyObject *control(PyObject *self, PyObject *args)
{
    enum { TYPE, TOPIC, SEQ, STAMP, EPOCH, FLAGS, NUMBERS };
    PyObject *given[NUMBERS];
    uint64_t numbers[NUMBERS];
    const char *body;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "OOOOOOy#", given, given + 1, given + 2, given + 3, given + 4, given + 5, &body, &length))
        return NULL;
    for (int i = 0; i < NUMBERS; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(given[i]);
        if (numbers[i] == UINT64_MAX && PyErr_Occurred()) return NULL;
    }
    int64_t size = HEADER_BYTES + PADDED((int64_t)length);
    if (numbers[TYPE] > 0xFF || numbers[EPOCH] > LOW32 || numbers[FLAGS] > 0xFF || size > (int64_t)LOW32) {
        PyErr_Format(PyExc_OverflowError, "frame header field out of range: type=%llu, epoch=%llu, flags=%llu, "
                     "body of %zd bytes", (unsigned long long)numbers[TYPE], (unsigned long long)numbers[EPOCH],
                     (unsigned long long)numbers[FLAGS], length);
        return NULL;
    }
    PyObject *found = PyByteArray_FromStringAndSize(NULL, size);
    if (found == NULL) return NULL;
    uint8_t *header = (uint8_t *)PyByteArray_AsString(found), *at = header + HEADER_BYTES;
    memset(header, 0, HEADER_BYTES);
    memcpy(at, body, (size_t)length);
    memset(at + length, 0, (size_t)(size - HEADER_BYTES - length));
    store(header, (uint64_t)(size - LEN_BYTES) | numbers[TYPE] << 32 | (uint64_t)VERSION << VERSION_SHIFT);
    store(header + W_TOPIC * 8, numbers[TOPIC]);
    store(header + W_BASE_SEQ * 8, numbers[SEQ]);
    store(header + W_COMMIT_TS * 8, numbers[STAMP]);
    store(header + W_COUNT_EPOCH * 8, numbers[EPOCH] << 32);
    store(header + W_TAIL * 8, (uint64_t)length | numbers[FLAGS] << FLAGS_SHIFT);
    store(header + W_BODY * 8, XXH3_64bits(at, (size_t)(size - HEADER_BYTES)));
    return found;
}

PyDoc_STRVAR(stamp_doc,
"stamp(buffer, offsets, topic_id, epoch, producer_id, first_seq, follows, /)\n--\n\n"
"Write identity into the headers that begin at byte `offsets`, (n + 1,) int64 of which the last is not one: frame i\n"
"gets producer_seq first_seq + i and follows the one before, the first one if `follows`. Returns the size in bytes\n"
"that all frames have, or 0 where they differ.");

static PyObject *stamp(PyObject *self, PyObject *args)
{
    Py_buffer buffer, offsets;
    unsigned long long topic_id, epoch, producer_id, first_seq;
    int follows;
    if (!PyArg_ParseTuple(args, "w*y*KKKKp", &buffer, &offsets, &topic_id, &epoch, &producer_id, &first_seq, &follows))
        return NULL;
    PyObject *found = NULL;
    int64_t size = 0;
    for (Py_ssize_t i = 0; i + 1 < offsets.len / 8; i++) {
        int64_t at = (int64_t)load((const uint8_t *)offsets.buf + i * 8);
        int64_t total = (int64_t)load((const uint8_t *)offsets.buf + (i + 1) * 8) - at;
        size = i == 0 || size == total ? total : 0;
        if (at < 0 || at > buffer.len - HEADER_BYTES) {
            PyErr_Format(PyExc_ValueError, "offset %lld of frame %zd is outside the buffer of %zd bytes", (long long)at,
                         i, buffer.len);
            goto done;
        }
        uint8_t *row = (uint8_t *)buffer.buf + at;
        uint64_t tail = load(row + W_TAIL * 8) & ~(FOLLOWS << FLAGS_SHIFT);
        store(row + W_TOPIC * 8, topic_id);
        store(row + W_COUNT_EPOCH * 8, (load(row + W_COUNT_EPOCH * 8) & LOW32) | epoch << 32);
        store(row + W_PRODUCER_ID * 8, producer_id);
        store(row + W_PRODUCER_SEQ * 8, first_seq + (uint64_t)i);
        store(row + W_TAIL * 8, i || follows ? tail | FOLLOWS << FLAGS_SHIFT : tail);
    }
    found = PyLong_FromLongLong(size);
done:
    PyBuffer_Release(&buffer);
    PyBuffer_Release(&offsets);
    return found;
}

/* ---- waiting ------------------------------------------------------------------------------------------------- */

/* Pause instructions between two reads of the clock: some hundred nanoseconds, in which the other hardware
 * thread has the core for itself. */
enum { PAUSES = 16 };
#define POLL_NS_MAX 1000000000ull

#ifdef _WIN32
static uint64_t monotonic_ns(void)
{
    LARGE_INTEGER now, second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&second);
    return (uint64_t)((double)now.QuadPart * 1e9 / (double)second.QuadPart);
}

static void offer_processor(void) { SwitchToThread(); }
static uint64_t load_acquire(const uint64_t *at)
{
    uint64_t word = *(const volatile uint64_t *)at;
    MemoryBarrier();
    return word;
}
#else
static uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void offer_processor(void) { sched_yield(); }
static uint64_t load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
#endif

static void pause_briefly(void)
{
    for (int i = 0; i < PAUSES; i++) {
#if defined(_WIN32)
        YieldProcessor();
#elif defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

PyDoc_STRVAR(look_doc,
"look(words, seen, ns, /)\n--\n\n"
"Look at words of shared memory, without the interpreter's lock, until one is another than was seen or `ns`\n"
"nanoseconds, at most a second, are over; True for the former. The processor is offered to others meanwhile.\n\n"
"words  list of up to SPIN_WORDS_MAX buffers that begin with a word, at a multiple of 8\n"
"seen   list of as many integers");

enum { SPIN_WORDS_MAX = 64, LOOKS_PER_YIELD = 8 };

static int differs(const uint64_t *const *words, const uint64_t *seen, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (load_acquire(words[i]) != seen[i]) return 1;
    return 0;
}

static PyObject *look(PyObject *self, PyObject *args)
{
    PyObject *words, *seen, *found = NULL;
    unsigned long long ns;
    Py_buffer buffers[SPIN_WORDS_MAX];
    const uint64_t *places[SPIN_WORDS_MAX];
    uint64_t values[SPIN_WORDS_MAX];
    Py_ssize_t held = 0;
    if (!PyArg_ParseTuple(args, "O!O!K", &PyList_Type, &words, &PyList_Type, &seen, &ns)) return NULL;
    const Py_ssize_t count = PyList_Size(words);
    if (count > SPIN_WORDS_MAX || count != PyList_Size(seen) || ns > POLL_NS_MAX) {
        PyErr_Format(PyExc_ValueError, "words must be at most %d, seen as many, ns at most %llu, got %zd, %zd and %llu",
                     SPIN_WORDS_MAX, POLL_NS_MAX, count, PyList_Size(seen), ns);
        return NULL;
    }
    for (; held < count; held++) {
        values[held] = PyLong_AsUnsignedLongLong(PyList_GetItem(seen, held));
        if (PyErr_Occurred()) goto done;
        if (PyObject_GetBuffer(PyList_GetItem(words, held), &buffers[held], PyBUF_SIMPLE)) goto done;
        places[held] = buffers[held].buf;
        if (buffers[held].len < 8 || (uintptr_t)places[held] & 7) {
            held++;
            PyErr_Format(PyExc_ValueError, "words[%zd] must have >= 8 bytes, at an address that is a multiple of 8",
                         held - 1);
            goto done;
        }
    }
    int is_there = differs(places, values, count);
    if (!is_there && ns) {
        Py_BEGIN_ALLOW_THREADS
        const uint64_t end = monotonic_ns() + ns;
        for (int i = 1; !is_there && monotonic_ns() < end; i++) {
            pause_briefly();
            /* The process that will change the word may be waiting for this CPU. */
            if (!(i % LOOKS_PER_YIELD)) offer_processor();
            is_there = differs(places, values, count);
        }
        Py_END_ALLOW_THREADS
    }
    found = PyBool_FromLong(is_there);
done:
    while (held > 0) PyBuffer_Release(&buffers[--held]);
    return found;
}

PyDoc_STRVAR(json_structure_doc,
"json_structure(text, seed, level, names, /)\n--\n\n"
"Return (depth, offset, is_compact, found, has_escapes) of a JSON text: its deepest nesting, at most JSON_DEPTH_MAX + 1 where it\n"
"ends; the offset of the first key that its object already has, else -1; whether it has no white space between\n"
"tokens; a bit for each name that is a key of an object at this level of nesting; and whether a key has an escape.\n"
"Keys are compared as they are written; a key with an escape at the level sets all bits. A text that is no JSON gives\n"
"some result: a parser must check it.\n\n"
"seed   secret of the hash table of keys, so that no text can slow it down\n"
"level  1 = the outermost object\n"
"names  at most JSON_NAMES_MAX names, each followed by a zero byte");

enum { JSON_DEPTH_MAX = 128, FEW_KEYS = 16, KEYS_FIRST = 64, JSON_NAMES_MAX = 32 };

typedef struct { const char *at; uint32_t size; uint32_t object; uint64_t hash; } json_key;
/* Keys of the open objects, outermost first. An object with more than FEW_KEYS keys has them in the table, too. */
typedef struct { json_key *rows, *table; size_t used, capacity, table_used, table_capacity; uint64_t seed; } json_keys;

static json_key *table_row(json_key *table, size_t capacity, const json_key *key)
{
    for (size_t i = (size_t)key->hash & (capacity - 1);; i = (i + 1) & (capacity - 1)) {
        json_key *row = &table[i];
        if (!row->at || (row->hash == key->hash && row->object == key->object && row->size == key->size &&
                         !memcmp(row->at, key->at, key->size)))
            return row;
    }
}

/* 1: the table has the key already. -1: no memory. */
static int add_to_table(json_keys *keys, json_key *key)
{
    if (keys->table_used * 2 >= keys->table_capacity) {
        const size_t capacity = keys->table_capacity ? keys->table_capacity * 2 : KEYS_FIRST;
        json_key *table = calloc(capacity, sizeof(json_key));
        if (!table) return -1;
        for (size_t i = 0; i < keys->table_capacity; i++)
            if (keys->table[i].at) *table_row(table, capacity, &keys->table[i]) = keys->table[i];
        free(keys->table);
        keys->table = table;
        keys->table_capacity = capacity;
    }
    key->hash = XXH3_64bits_withSeed(key->at, key->size, keys->seed) ^ key->object * 0x9e3779b97f4a7c15u;
    json_key *row = table_row(keys->table, keys->table_capacity, key);
    if (row->at) return 1;
    *row = *key;
    keys->table_used++;
    return 0;
}

/* Add a key to the innermost object, whose keys begin at `first`. Returns as add_to_table. */
static int add_key(json_keys *keys, size_t first, json_key *key)
{
    const size_t count = keys->used - first;
    if (count < FEW_KEYS) {
        for (size_t i = first; i < keys->used; i++)
            if (keys->rows[i].size == key->size && !memcmp(keys->rows[i].at, key->at, key->size)) return 1;
    } else {
        if (count == FEW_KEYS)
            for (size_t i = first; i < keys->used; i++)
                if (add_to_table(keys, &keys->rows[i]) < 0) return -1;
        const int found = add_to_table(keys, key);
        if (found) return found;
    }
    if (keys->used == keys->capacity) {
        const size_t capacity = keys->capacity ? keys->capacity * 2 : KEYS_FIRST;
        json_key *rows = realloc(keys->rows, capacity * sizeof(json_key));
        if (!rows) return -1;
        keys->rows = rows;
        keys->capacity = capacity;
    }
    keys->rows[keys->used++] = *key;
    return 0;
}

/* The quote that ends the string whose contents begin at `at`, or `stop`. */
static const char *string_end(const char *at, const char *stop)
{
    for (const char *from = at; from < stop;) {
        const char *const quote = memchr(from, '"', (size_t)(stop - from));
        if (!quote) break;
        const char *escape = quote;
        while (escape > from && escape[-1] == '\\') escape--;
        if (!((quote - escape) & 1)) return quote;
        from = quote + 1;
    }
    return stop;
}

/* The bits of the names that are equal to the key, which is not terminated. */
static uint32_t name_bits(const json_key *key, const char *names, const char *stop)
{
    uint32_t bit = 1;
    for (const char *name = names; name < stop; bit <<= 1) {
        const size_t size = strlen(name);
        if (size == key->size && !memcmp(name, key->at, size)) return bit;
        name += size + 1;
    }
    return 0;
}

static PyObject *json_structure(PyObject *self, PyObject *args)
{
    Py_buffer view;
    unsigned long long seed;
    const char *names;
    Py_ssize_t names_bytes, count = 0;
    int level;
    if (!PyArg_ParseTuple(args, "y*Kiy#", &view, &seed, &level, &names, &names_bytes)) return NULL;
    for (Py_ssize_t i = 0; i < names_bytes; i++) count += !names[i];
    if (count > JSON_NAMES_MAX || (names_bytes && names[names_bytes - 1])) {
        PyErr_Format(PyExc_ValueError, "names must be at most %d and end with a zero byte, got %zd", JSON_NAMES_MAX, count);
        PyBuffer_Release(&view);
        return NULL;
    }
    uint32_t found_names = 0;
    const char *const text = view.buf, *const stop = text + view.len;
    uint32_t object_of[JSON_DEPTH_MAX + 2] = {0}, objects = 0; /* 0: an array */
    size_t first_of[JSON_DEPTH_MAX + 2] = {0};
    int depth = 0, deepest = 0, wants_key = 0, failed = 0, is_compact = 1, has_escapes = 0;
    Py_ssize_t repeated = -1;
    json_keys keys = {NULL, NULL, 0, 0, 0, 0, seed};
    for (const char *at = text; at < stop && repeated < 0 && deepest <= JSON_DEPTH_MAX; at++) {
        switch (*at) {
        case '{': case '[':
            if (++depth > deepest) deepest = depth;
            if (depth > JSON_DEPTH_MAX) break;
            wants_key = *at == '{';
            object_of[depth] = wants_key ? ++objects : 0;
            first_of[depth] = keys.used;
            break;
        case '}': case ']':
            if (depth > 0) keys.used = first_of[depth--];
            wants_key = 0;
            break;
        case ' ': case '\n': case '\r': case '\t':
            is_compact = 0;
            break;
        case ',':
            wants_key = object_of[depth] != 0;
            break;
        case '"': {
            const char *const end = string_end(at + 1, stop);
            if (wants_key) {
                json_key key = {at + 1, (uint32_t)(end - at - 1), object_of[depth], 0};
                const int is_escaped = memchr(key.at, '\\', key.size) != NULL;
                has_escapes |= is_escaped;
                if (depth == level)
                    found_names |= is_escaped ? UINT32_MAX : name_bits(&key, names, names + names_bytes);
                const int found = add_key(&keys, first_of[depth], &key);
                if (found < 0) failed = 1;
                if (found) repeated = at - text;
            }
            wants_key = 0;
            at = end;
            break;
        }
        }
    }
    free(keys.rows);
    free(keys.table);
    PyBuffer_Release(&view);
    if (failed) return PyErr_NoMemory();
    return Py_BuildValue("inOIO", deepest, repeated, is_compact ? Py_True : Py_False,
                         found_names & (count == JSON_NAMES_MAX ? UINT32_MAX : (UINT32_C(1) << count) - 1),
                         has_escapes ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"control", control, METH_VARARGS, control_doc},
    {"encode", encode, METH_VARARGS, encode_doc},
    {"header_faults", header_faults, METH_VARARGS, header_faults_doc},
    {"hashes", hashes, METH_VARARGS, hashes_doc},
    {"json_structure", json_structure, METH_VARARGS, json_structure_doc},
    {"judge", judge, METH_VARARGS, judge_doc},
    {"look", look, METH_VARARGS, look_doc},
    {"measure", measure, METH_VARARGS, measure_doc},
    {"number", number, METH_VARARGS, number_doc},
    {"scan", scan, METH_VARARGS, scan_doc},
    {"seal", seal, METH_VARARGS, seal_doc},
    {"seal_at", seal_at, METH_VARARGS, seal_at_doc},
    {"seals", seals, METH_VARARGS, seals_doc},
    {"spans", spans, METH_VARARGS, spans_doc},
    {"stamp", stamp, METH_VARARGS, stamp_doc},
    {"take", take, METH_VARARGS, take_doc},
    {"walk", walk_py, METH_VARARGS, walk_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", "The commit path's per-frame work, and a wait, compiled; see native/kernel.c.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void)
{
    return PyModuleDef_Init(&module);
}
