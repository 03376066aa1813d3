/* The native half of rows.py, in the words of __init__.py: stage one request's blocks, pack a
   step's packet. It does what python_staging.py does, with the same results. Calls that hold
   anything but plain ints in lists or tuples, or anything wrong, go to `plain`
   (block_ids.plain_request), which raises the error or returns the same request in plain form.

   Between the checks of a call and its effects no Python code runs and the interpreter's lock is
   held, so a call is done whole or not at all. Rows, lengths and ids are int32; sums are int64. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t columns_per_block;
    int64_t width;
    int64_t max_block_id;
    int64_t is_state; /* 1: kernels read the row's cells whatever its length, so they are cleared */
} Group;

typedef struct {
    Py_ssize_t record;
    Py_ssize_t group;
    Py_ssize_t length;
} Piece;

typedef struct {
    PyObject_HEAD
    PyObject *plain;
    Py_buffer lengths;     /* int32 [max_num_reqs, num_groups], filled columns */
    Py_buffer generations; /* int32 [max_num_reqs] */
    Py_buffer largest_ids; /* int32 [num_groups] */
    Py_buffer cells;       /* int32 [max_num_reqs, num_groups], cells that may hold an id */
    Py_ssize_t num_groups;
    Py_ssize_t max_num_reqs;
    Group *groups;
    int32_t *largest_of_call; /* [num_groups] */
    int32_t *begins_of_call;  /* [num_groups] */
    int32_t *record_of_row;  /* [max_num_reqs], -1 = none */
    int32_t *row_of_record;  /* [max_num_reqs] */
    Py_ssize_t *first_piece; /* [max_num_reqs], by record: an overwrite voids the pieces before */
    char *cleared;           /* [max_num_reqs], by record: the row was given back */
    int64_t *counts;        /* [max_num_reqs, num_groups], by record: staged columns */
    int64_t *ends;          /* [max_num_reqs, num_groups], by record: where `pack` writes next */
    Py_ssize_t num_records;
    int64_t num_columns; /* the sum of counts */
    int64_t num_calls;   /* that changed a row, since construction */
    Piece *pieces;
    Py_ssize_t num_pieces, piece_capacity;
    int32_t *ids; /* allocation block ids, piece after piece, those of void pieces included */
    Py_ssize_t num_ids, id_capacity;
} Staging;

/* Drop void pieces and their ids; of one record and group (if any: -1 = none) keep `kept` ids. */
static void
compact(Staging *self, Py_ssize_t record, Py_ssize_t group, Py_ssize_t kept)
{
    Py_ssize_t pieces = 0, ids = 0, source = 0;
    for (Py_ssize_t i = 0; i < self->num_pieces; i++) {
        Piece piece = self->pieces[i];
        Py_ssize_t length = i >= self->first_piece[piece.record] ? piece.length : 0;
        if (piece.record == record && piece.group == group) {
            length = length < kept ? length : kept;
            kept -= length;
        }
        if (length > 0) {
            memmove(self->ids + ids, self->ids + source, (size_t)length * sizeof(int32_t));
            self->pieces[pieces++] = (Piece){piece.record, piece.group, length};
            ids += length;
        }
        source += piece.length;
    }
    memset(self->first_piece, 0, (size_t)self->num_records * sizeof(Py_ssize_t));
    self->num_pieces = pieces;
    self->num_ids = ids;
}

/* `items` with room for `more` behind `used`: moved to twice that size unless half of it is free,
   so that the work of `reserve` is paid for by the calls before it. NULL: no memory. */
static void *
with_room(void *items, Py_ssize_t *capacity, Py_ssize_t used, Py_ssize_t more, size_t item_size)
{
    Py_ssize_t limit = PY_SSIZE_T_MAX / (Py_ssize_t)item_size / 2;
    if (more > limit || used > limit - more) {
        return PyErr_NoMemory();
    }
    Py_ssize_t needed = used + more;
    if (items != NULL && needed <= *capacity / 2) {
        return items;
    }
    void *grown = PyMem_Realloc(items, 2 * (size_t)needed * item_size);
    if (grown == NULL) {
        return PyErr_NoMemory();
    }
    *capacity = 2 * needed;
    return grown;
}

static int
reserve(Staging *self, Py_ssize_t more_pieces, Py_ssize_t more_ids)
{
    if (more_pieces <= self->piece_capacity - self->num_pieces
        && more_ids <= self->id_capacity - self->num_ids) {
        return 0;
    }
    compact(self, -1, -1, 0);
    Piece *pieces = with_room(self->pieces, &self->piece_capacity, self->num_pieces, more_pieces,
                              sizeof(Piece));
    if (pieces == NULL) {
        return -1;
    }
    self->pieces = pieces;
    int32_t *ids
        = with_room(self->ids, &self->id_capacity, self->num_ids, more_ids, sizeof(int32_t));
    if (ids == NULL) {
        return -1;
    }
    self->ids = ids;
    return 0;
}

/* Empty a row; pieces already staged for it are void. */
static void
start_anew(Staging *self, Py_ssize_t row)
{
    int32_t *lengths = (int32_t *)self->lengths.buf + row * self->num_groups;
    int32_t *generation = (int32_t *)self->generations.buf + row;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        lengths[g] = 0;
    }
    *generation = (int32_t)((uint32_t)*generation + 1u);
    Py_ssize_t record = self->record_of_row[row];
    if (record < 0) {
        return;
    }
    self->first_piece[record] = self->num_pieces;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        int64_t *count = &self->counts[record * self->num_groups + g];
        self->num_columns -= *count;
        *count = 0;
    }
}

static Py_ssize_t
record_of(Staging *self, Py_ssize_t row)
{
    Py_ssize_t record = self->record_of_row[row];
    if (record < 0) {
        record = self->num_records++;
        self->record_of_row[row] = (int32_t)record;
        self->row_of_record[record] = (int32_t)row;
        self->first_piece[record] = 0;
        self->cleared[record] = 0;
        for (Py_ssize_t g = 0; g < self->num_groups; g++) {
            self->counts[record * self->num_groups + g] = 0;
        }
    }
    return record;
}

/* The length of a list or tuple, -1 for anything else. */
static Py_ssize_t
plain_length(PyObject *items)
{
    if (PyList_CheckExact(items)) {
        return PyList_Size(items);
    }
    return PyTuple_CheckExact(items) ? PyTuple_Size(items) : -1;
}

/* A borrowed item of what `plain_length` knows. */
static PyObject *
plain_item(PyObject *items, Py_ssize_t i)
{
    return PyList_CheckExact(items) ? PyList_GetItem(items, i) : PyTuple_GetItem(items, i);
}

/* An int in [0, maximum], -1 for anything else: bools are not of exactly this type. */
static int64_t
plain_int(PyObject *value, int64_t maximum)
{
    if (!PyLong_CheckExact(value)) {
        return -1;
    }
    int overflow;
    long number = PyLong_AsLongAndOverflow(value, &overflow);
    return overflow || number < 0 || number > maximum ? -1 : number;
}

/* Copy one group's ids behind those staged; 0: one of them is no id of the group. */
static int
copy_ids(Staging *self, PyObject *group_ids, Py_ssize_t g, Py_ssize_t at)
{
    int64_t maximum = self->groups[g].max_block_id;
    int32_t largest = 0, *ids = self->ids + at;
    Py_ssize_t length = plain_length(group_ids);
    for (Py_ssize_t i = 0; i < length; i++) {
        int64_t block_id = plain_int(plain_item(group_ids, i), maximum);
        if (block_id < 0) {
            return 0;
        }
        ids[i] = (int32_t)block_id;
        largest = ids[i] > largest ? ids[i] : largest;
    }
    self->largest_of_call[g] = largest;
    return 1;
}

/* Copy all groups' ids behind those staged, for rows that go on at these columns (NULL: at 0);
   `*end` is behind the last. 1: copied; 0: not in plain form, or wrong; -1: an exception. */
static int
copy_all_ids(Staging *self, const int32_t *begins, PyObject *new_block_ids, Py_ssize_t *end)
{
    Py_ssize_t num_pieces = 0, num_ids = 0;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        Py_ssize_t length = plain_length(plain_item(new_block_ids, g));
        int64_t room = self->groups[g].width - (begins == NULL ? 0 : begins[g]);
        if (length < 0 || length > room / self->groups[g].columns_per_block) {
            return 0;
        }
        if (length > PY_SSIZE_T_MAX - num_ids) {
            PyErr_NoMemory();
            return -1;
        }
        num_pieces += length > 0;
        num_ids += length;
    }
    if (reserve(self, num_pieces, num_ids) < 0) {
        return -1;
    }
    *end = self->num_ids;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        PyObject *group_ids = plain_item(new_block_ids, g);
        if (!copy_ids(self, group_ids, g, *end)) {
            return 0;
        }
        *end += plain_length(group_ids);
    }
    return 1;
}

/* Append the ids that `copy_ids` put behind those staged, up to `at`; nothing fails. */
static void
append_pieces(Staging *self, Py_ssize_t row, PyObject *new_block_ids, Py_ssize_t at)
{
    Py_ssize_t record = record_of(self, row);
    int32_t *lengths = (int32_t *)self->lengths.buf + row * self->num_groups;
    int32_t *cells = (int32_t *)self->cells.buf + row * self->num_groups;
    int32_t *largest_ids = self->largest_ids.buf;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        Py_ssize_t length = plain_length(plain_item(new_block_ids, g));
        if (length == 0) {
            continue;
        }
        int64_t columns = length * self->groups[g].columns_per_block;
        self->pieces[self->num_pieces++] = (Piece){record, g, length};
        self->counts[record * self->num_groups + g] += columns;
        self->num_columns += columns;
        lengths[g] = (int32_t)(lengths[g] + columns);
        if (self->groups[g].is_state && lengths[g] > cells[g]) {
            cells[g] = lengths[g];
        }
        if (self->largest_of_call[g] > largest_ids[g]) {
            largest_ids[g] = self->largest_of_call[g];
        }
    }
    self->num_ids = at;
}

/* 1: staged; 0: not in plain form, or wrong, nothing changed; -1: an exception, nothing changed. */
static int
try_to_stage(Staging *self, PyObject *req_index, PyObject *new_block_ids, PyObject *overwrite)
{
    int64_t row = plain_int(req_index, (int64_t)self->max_num_reqs - 1);
    if (row < 0 || (overwrite != Py_True && overwrite != Py_False)
        || plain_length(new_block_ids) != self->num_groups) {
        return 0;
    }
    int anew = overwrite == Py_True;
    Py_ssize_t at;
    const int32_t *lengths = (int32_t *)self->lengths.buf + row * self->num_groups;
    int copied = copy_all_ids(self, anew ? NULL : lengths, new_block_ids, &at);
    if (copied <= 0) {
        return copied;
    }
    /* Nothing fails from here on. */
    if (anew) {
        start_anew(self, (Py_ssize_t)row);
    }
    else if (at == self->num_ids) {
        return 1;
    }
    append_pieces(self, (Py_ssize_t)row, new_block_ids, at);
    return 1;
}

/* Empty a group's row from column `begin` on, where it is longer; staged ids from there are void. */
static void
cut(Staging *self, Py_ssize_t row, Py_ssize_t g, int32_t begin)
{
    int32_t *length = (int32_t *)self->lengths.buf + row * self->num_groups + g;
    Py_ssize_t record = self->record_of_row[row];
    if (record >= 0) {
        int64_t *count = &self->counts[record * self->num_groups + g];
        int64_t kept = begin - (*length - *count);
        Py_ssize_t n = (Py_ssize_t)self->groups[g].columns_per_block;
        kept = kept > 0 ? kept - kept % n : 0;
        if (kept < *count) {
            compact(self, record, g, (Py_ssize_t)kept / n);
            self->num_columns -= *count - kept;
            *count = kept;
        }
    }
    *length = begin;
}

/* As `try_to_stage`, with the column of each group from which on its row is replaced. */
static int
try_to_write(Staging *self, PyObject *req_index, PyObject *begins, PyObject *new_block_ids)
{
    int64_t row = plain_int(req_index, (int64_t)self->max_num_reqs - 1);
    if (row < 0 || plain_length(begins) != self->num_groups
        || plain_length(new_block_ids) != self->num_groups) {
        return 0;
    }
    const int32_t *lengths = (int32_t *)self->lengths.buf + row * self->num_groups;
    int32_t *begin = self->begins_of_call;
    int shorter = 0;
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        int64_t column = plain_int(plain_item(begins, g), lengths[g]);
        if (column < 0 || column % self->groups[g].columns_per_block != 0) {
            return 0;
        }
        begin[g] = (int32_t)column;
        shorter |= column < lengths[g];
    }
    Py_ssize_t at;
    int copied = copy_all_ids(self, begin, new_block_ids, &at);
    if (copied <= 0) {
        return copied;
    }
    /* Nothing fails from here on. */
    Py_ssize_t new_ids = at - self->num_ids, copies = self->num_ids;
    if (!shorter && new_ids == 0) {
        return 1;
    }
    if (shorter) {
        int32_t *generation = (int32_t *)self->generations.buf + row;
        *generation = (int32_t)((uint32_t)*generation + 1u);
        record_of(self, (Py_ssize_t)row);
        for (Py_ssize_t g = 0; g < self->num_groups; g++) {
            if (begin[g] < lengths[g]) {
                cut(self, (Py_ssize_t)row, g, begin[g]);
            }
        }
        memmove(self->ids + self->num_ids, self->ids + copies, (size_t)new_ids * sizeof(int32_t));
    }
    append_pieces(self, (Py_ssize_t)row, new_block_ids, self->num_ids + new_ids);
    return 1;
}

/* Stage what `plain` makes of a request that is not in plain form. */
static int
stage_in_plain_form(Staging *self, PyObject *const *args)
{
    if (self->plain == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this object was garbage");
        return -1;
    }
    PyObject *request
        = PyObject_CallFunctionObjArgs(self->plain, args[0], args[1], args[2], NULL);
    if (request == NULL) {
        return -1;
    }
    int staged = 0;
    if (PyTuple_CheckExact(request) && PyTuple_Size(request) == 3) {
        staged = try_to_stage(self, PyTuple_GetItem(request, 0), PyTuple_GetItem(request, 1),
                              PyTuple_GetItem(request, 2));
    }
    Py_DECREF(request);
    if (staged == 0) {
        PyErr_SetString(PyExc_RuntimeError, "a request in plain form was not accepted");
    }
    return staged == 1 ? 0 : -1;
}

static PyObject *
staging_stage(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Staging *self = (Staging *)object;
    if (num_args != 3) {
        PyErr_Format(PyExc_TypeError, "stage takes 3 arguments, got %zd", num_args);
        return NULL;
    }
    int staged = try_to_stage(self, args[0], args[1], args[2]);
    if (staged < 0 || (staged == 0 && stage_in_plain_form(self, args) < 0)) {
        return NULL;
    }
    self->num_calls++;
    Py_RETURN_NONE;
}

static PyObject *
staging_write(PyObject *object, PyObject *const *args, Py_ssize_t num_args)
{
    Staging *self = (Staging *)object;
    if (num_args != 3) {
        PyErr_Format(PyExc_TypeError, "write takes 3 arguments, got %zd", num_args);
        return NULL;
    }
    int written = try_to_write(self, args[0], args[1], args[2]);
    if (written == 0) {
        PyErr_SetString(PyExc_ValueError, "a request in plain form was not accepted");
    }
    if (written <= 0) {
        return NULL;
    }
    self->num_calls++;
    Py_RETURN_NONE;
}

static PyObject *
staging_clear_row(PyObject *object, PyObject *req_index)
{
    Staging *self = (Staging *)object;
    int64_t row = plain_int(req_index, (int64_t)self->max_num_reqs - 1);
    if (row < 0) {
        PyErr_SetString(PyExc_ValueError, "no such row");
        return NULL;
    }
    start_anew(self, (Py_ssize_t)row);
    self->cleared[record_of(self, (Py_ssize_t)row)] = 1;
    self->num_calls++;
    Py_RETURN_NONE;
}

/* Cells of a record's row in a group that its packet makes zero: those of a row given back. A
   caller may have emptied the row behind staged ids: then these are written. */
static int64_t
cells_to_clear(const Staging *self, Py_ssize_t record, Py_ssize_t g)
{
    if (!self->cleared[record] || !self->groups[g].is_state
        || self->counts[record * self->num_groups + g] > 0) {
        return 0;
    }
    Py_ssize_t at = self->row_of_record[record] * self->num_groups + g;
    return ((int32_t *)self->lengths.buf)[at] == 0 ? ((int32_t *)self->cells.buf)[at] : 0;
}

/* int32 elements behind the fields of a packet. */
static int64_t
num_packed(const Staging *self)
{
    int64_t sum = self->num_columns;
    for (Py_ssize_t record = 0; record < self->num_records; record++) {
        for (Py_ssize_t g = 0; self->cleared[record] && g < self->num_groups; g++) {
            sum += cells_to_clear(self, record, g);
        }
    }
    return sum;
}

static PyObject *
staging_clear(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Staging *self = (Staging *)object;
    for (Py_ssize_t record = 0; record < self->num_records; record++) {
        int32_t row = self->row_of_record[record];
        for (Py_ssize_t g = 0; self->cleared[record] && g < self->num_groups; g++) {
            if (cells_to_clear(self, record, g) > 0) {
                ((int32_t *)self->cells.buf)[row * self->num_groups + g] = 0;
            }
        }
        self->record_of_row[row] = -1;
    }
    self->num_records = self->num_pieces = self->num_ids = 0;
    self->num_columns = 0;
    Py_RETURN_NONE;
}

/* int32 elements before the column ids of a packet. */
static int64_t
num_fields(const Staging *self)
{
    return self->max_num_reqs + self->num_records * (2 + 3 * (int64_t)self->num_groups);
}

/* Write the packet's column ids, each piece behind the pieces of its row and group before it. */
static void
pack_ids(Staging *self, int32_t *packed)
{
    const int32_t *ids = self->ids;
    for (Py_ssize_t i = 0; i < self->num_pieces; i++) {
        Piece piece = self->pieces[i];
        if (i >= self->first_piece[piece.record]) {
            int64_t n = self->groups[piece.group].columns_per_block;
            int64_t *end = &self->ends[piece.record * self->num_groups + piece.group];
            int32_t *column = packed + *end;
            *end += piece.length * n;
            if (n == 1) {
                memcpy(column, ids, (size_t)piece.length * sizeof(int32_t));
            }
            else {
                for (Py_ssize_t k = 0; k < piece.length; k++) {
                    for (int64_t part = 0; part < n; part++) {
                        *column++ = (int32_t)(ids[k] * n + part);
                    }
                }
            }
        }
        ids += piece.length;
    }
}

/* Write the packet (packet.py); returns the columns of the longest record. */
static int64_t
pack_into(Staging *self, int32_t *packet)
{
    int32_t *lines = packet + self->max_num_reqs;
    int32_t *fields = lines + 2 * self->num_records;
    int32_t *column_ids = packet + num_fields(self);
    const int32_t *generations = self->generations.buf;
    int64_t offset = 0, longest = 0;
    memcpy(packet, self->record_of_row, (size_t)self->max_num_reqs * sizeof(int32_t));
    for (Py_ssize_t record = 0; record < self->num_records; record++) {
        int32_t row = self->row_of_record[record];
        const int32_t *lengths = (int32_t *)self->lengths.buf + row * self->num_groups;
        *lines++ = row;
        *lines++ = generations[row];
        for (Py_ssize_t g = 0; g < self->num_groups; g++) {
            int64_t zeros = cells_to_clear(self, record, g);
            int64_t count = self->counts[record * self->num_groups + g] + zeros;
            if (zeros > 0) {
                memset(column_ids + offset, 0, (size_t)zeros * sizeof(int32_t));
            }
            *fields++ = (int32_t)(lengths[g] - count);
            *fields++ = lengths[g];
            *fields++ = (int32_t)offset;
            self->ends[record * self->num_groups + g] = offset;
            offset += count;
            longest = count > longest ? count : longest;
        }
    }
    pack_ids(self, fields);
    return longest;
}

/* An aligned, contiguous, writable buffer; -1: an exception. */
static int
get_buffer(PyObject *object, Py_buffer *view, size_t alignment)
{
    if (PyObject_GetBuffer(object, view, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    if ((uintptr_t)view->buf % alignment != 0) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "the buffer is not aligned");
        return -1;
    }
    return 0;
}

/* Whether a packet lies in memory that is read while it is written. */
static int
is_read(const Staging *self, const Py_buffer *packet)
{
    const Py_buffer *read[] = {&self->lengths, &self->generations, &self->cells};
    uintptr_t begin = (uintptr_t)packet->buf, end = begin + (size_t)packet->len;
    for (size_t i = 0; i < sizeof(read) / sizeof(read[0]); i++) {
        uintptr_t other = (uintptr_t)read[i]->buf;
        if (begin < other + (size_t)read[i]->len && other < end) {
            return 1;
        }
    }
    return 0;
}

static PyObject *
staging_pack(PyObject *object, PyObject *packet)
{
    Staging *self = (Staging *)object;
    Py_buffer view;
    if (get_buffer(packet, &view, sizeof(int32_t)) < 0) {
        return NULL;
    }
    /* Getting a buffer may run Python code, so the size is looked at behind it. */
    int64_t size = num_fields(self) + num_packed(self);
    PyObject *longest = NULL;
    if (num_packed(self) > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more columns are staged than int32 offsets reach");
    }
    else if (view.len / (Py_ssize_t)sizeof(int32_t) < size) {
        PyErr_SetString(PyExc_ValueError, "the packet is too small");
    }
    else if (is_read(self, &view)) {
        PyErr_SetString(PyExc_ValueError, "the packet lies in the rows' own memory");
    }
    else {
        longest = PyLong_FromLongLong(pack_into(self, view.buf));
    }
    PyBuffer_Release(&view);
    return longest;
}

static PyObject *
staging_pending(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((Staging *)object)->num_records > 0);
}

static PyObject *
staging_packet_size(PyObject *object, void *Py_UNUSED(unused))
{
    Staging *self = (Staging *)object;
    return PyLong_FromLongLong(num_fields(self) + num_packed(self));
}

static PyObject *
staging_num_calls(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromLongLong(((Staging *)object)->num_calls);
}

static PyObject *
staging_num_rows(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromSsize_t(((Staging *)object)->num_records);
}

static PyObject *
staging_rows(PyObject *object, void *Py_UNUSED(unused))
{
    Staging *self = (Staging *)object;
    PyObject *rows = PyList_New(0);
    for (Py_ssize_t record = 0; rows != NULL && record < self->num_records; record++) {
        PyObject *row = PyLong_FromLong(self->row_of_record[record]);
        if (row == NULL || PyList_Append(rows, row) < 0) {
            Py_CLEAR(rows);
        }
        Py_XDECREF(row);
    }
    return rows;
}

/* Copy the groups' limits, int64 [num_groups, 4]; -1: an exception. */
static int
set_groups(Staging *self, const Py_buffer *limits)
{
    self->num_groups = limits->len / (Py_ssize_t)sizeof(Group);
    self->groups = PyMem_Malloc((size_t)limits->len);
    if (self->groups == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(self->groups, limits->buf, (size_t)self->num_groups * sizeof(Group));
    for (Py_ssize_t g = 0; g < self->num_groups; g++) {
        Group group = self->groups[g];
        if (group.columns_per_block < 1 || group.width < 0 || group.width > INT32_MAX
            || group.max_block_id < 0
            || group.max_block_id > (INT32_MAX - (group.columns_per_block - 1))
                                        / group.columns_per_block) {
            PyErr_SetString(PyExc_ValueError, "a limit is outside int32");
            return -1;
        }
    }
    return 0;
}

/* Allocate what has one size for life; -1: an exception. */
static int
allocate(Staging *self)
{
    size_t num_rows = (size_t)self->max_num_reqs, num_groups = (size_t)self->num_groups;
    if (self->max_num_reqs > INT32_MAX || self->num_groups > INT32_MAX
        || self->lengths.len / (Py_ssize_t)sizeof(int32_t)
               != (int64_t)self->max_num_reqs * self->num_groups
        || self->cells.len != self->lengths.len
        || self->largest_ids.len / (Py_ssize_t)sizeof(int32_t) != self->num_groups) {
        PyErr_SetString(PyExc_ValueError, "the buffers' sizes do not agree");
        return -1;
    }
    self->largest_of_call = PyMem_Calloc(num_groups, sizeof(int32_t));
    self->begins_of_call = PyMem_Calloc(num_groups, sizeof(int32_t));
    self->cleared = PyMem_Calloc(num_rows, sizeof(char));
    self->record_of_row = PyMem_Calloc(num_rows, sizeof(int32_t));
    self->row_of_record = PyMem_Calloc(num_rows, sizeof(int32_t));
    self->first_piece = PyMem_Calloc(num_rows, sizeof(Py_ssize_t));
    self->counts = PyMem_Calloc(num_rows * num_groups, sizeof(int64_t));
    self->ends = PyMem_Calloc(num_rows * num_groups, sizeof(int64_t));
    if (self->largest_of_call == NULL || self->begins_of_call == NULL || self->cleared == NULL
        || self->record_of_row == NULL || self->row_of_record == NULL || self->first_piece == NULL
        || self->counts == NULL || self->ends == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t row = 0; row < self->max_num_reqs; row++) {
        self->record_of_row[row] = -1;
    }
    return reserve(self, 1, 1);
}

static PyObject *
staging_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *plain, *lengths, *generations, *largest_ids, *cells, *limits;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Staging takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOOOOO", &plain, &lengths, &generations, &largest_ids, &cells,
                          &limits)) {
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Staging *self = (Staging *)alloc(type, 0); /* zeros, so that a half-made one can be freed */
    if (self == NULL) {
        return NULL;
    }
    Py_INCREF(plain);
    self->plain = plain;
    Py_buffer view;
    if (get_buffer(limits, &view, sizeof(int64_t)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    int failed = set_groups(self, &view);
    PyBuffer_Release(&view);
    if (failed < 0 || get_buffer(lengths, &self->lengths, sizeof(int32_t)) < 0
        || get_buffer(generations, &self->generations, sizeof(int32_t)) < 0
        || get_buffer(largest_ids, &self->largest_ids, sizeof(int32_t)) < 0
        || get_buffer(cells, &self->cells, sizeof(int32_t)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->max_num_reqs = self->generations.len / (Py_ssize_t)sizeof(int32_t);
    if (allocate(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
staging_traverse(PyObject *object, visitproc visit, void *arg)
{
    Staging *self = (Staging *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->plain);
    Py_VISIT(self->lengths.obj);
    Py_VISIT(self->generations.obj);
    Py_VISIT(self->largest_ids.obj);
    Py_VISIT(self->cells.obj);
    return 0;
}

/* Give up what may be part of a cycle. Other garbage may still call: it finds no rows at all. */
static int
staging_tp_clear(PyObject *object)
{
    Staging *self = (Staging *)object;
    self->max_num_reqs = self->num_groups = 0;
    self->num_records = self->num_pieces = self->num_ids = 0;
    self->num_columns = 0;
    Py_CLEAR(self->plain);
    PyBuffer_Release(&self->lengths);
    PyBuffer_Release(&self->generations);
    PyBuffer_Release(&self->largest_ids);
    PyBuffer_Release(&self->cells);
    return 0;
}

static void
staging_dealloc(PyObject *object)
{
    Staging *self = (Staging *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    staging_tp_clear(object);
    PyMem_Free(self->groups);
    PyMem_Free(self->largest_of_call);
    PyMem_Free(self->begins_of_call);
    PyMem_Free(self->cleared);
    PyMem_Free(self->record_of_row);
    PyMem_Free(self->row_of_record);
    PyMem_Free(self->first_piece);
    PyMem_Free(self->counts);
    PyMem_Free(self->ends);
    PyMem_Free(self->pieces);
    PyMem_Free(self->ids);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef staging_methods[] = {
    /* Through void (*)(void), as a fastcall function has another type than the table's entry. */
    {"stage", (PyCFunction)(void (*)(void))staging_stage, METH_FASTCALL, NULL},
    {"write", (PyCFunction)(void (*)(void))staging_write, METH_FASTCALL, NULL},
    {"clear_row", staging_clear_row, METH_O, NULL},
    {"clear", staging_clear, METH_NOARGS, NULL},
    {"pack", staging_pack, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef staging_properties[] = {
    {"pending", staging_pending, NULL, NULL, NULL},
    {"packet_size", staging_packet_size, NULL, NULL, NULL},
    {"num_calls", staging_num_calls, NULL, NULL, NULL},
    {"rows", staging_rows, NULL, NULL, NULL},
    {"num_rows", staging_num_rows, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot staging_slots[] = {
    {Py_tp_new, staging_new},
    {Py_tp_dealloc, staging_dealloc},
    {Py_tp_traverse, staging_traverse},
    {Py_tp_clear, staging_tp_clear},
    {Py_tp_methods, staging_methods},
    {Py_tp_getset, staging_properties},
    {0, NULL},
};

static PyType_Spec staging_spec = {
    .name = "fused_slots.host._staging.Staging",
    .basicsize = sizeof(Staging),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = staging_slots,
};

static int
add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &staging_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_type},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fused_slots.host._staging",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__staging(void)
{
    return PyModuleDef_Init(&module_definition);
}
