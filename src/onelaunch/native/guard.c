/* The check of `guard.StateGuard`, without an interpreter loop.
 *
 * A recording of ResNet-50 relies on 2,000 slots and 320 tensors, far too many for Python. Tensors
 * are read through the C interface that libtorch exports and keeps stable (aoti_torch_*), which
 * needs no header of torch: `place` is the offset, in the Python object, of the one pointer that an
 * at::Tensor consists of.
 *
 * All that a check expects is given as data; nothing is taken from how things are when it is made.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* A tensor keeps the sizes of up to so many dimensions in itself, within so many bytes. */
#define FEW 5
#define NEAR 192

typedef int32_t (*get_pointer)(void *, void **);
typedef int32_t (*get_numbers)(void *, int64_t **);
typedef int32_t (*get_number)(void *, int64_t *);
typedef int32_t (*get_dtype)(void *, int32_t *);

static PyObject *vars_of; /* the builtin `vars` */
static PyObject *missing; /* stands for the content of an empty slot */

static struct {
    get_pointer data;
    get_numbers sizes, strides;
    get_number dim;
    get_dtype dtype;
    Py_ssize_t place;
    PyGetSetDef *requires_grad;
    PyTypeObject *type; /* of tensors */
} torch;

typedef struct {
    PyObject *object;
    PyTypeObject *type;
    void *tensor; /* in the object */
    void *data;
    int64_t dim;
    int64_t *layout;          /* sizes, then strides */
    void *inside;             /* what the pointer in `tensor` led to */
    int64_t *sizes, *strides; /* where these lie in it, or NULL: elsewhere, where they may move */
    int32_t dtype;
    int requires_grad; /* 1 or 0; -1: it does not matter */
} Memory;

#define EACH_PART(act) /* on each object that the collector must know */                           \
    act(self->readers); act(self->expected); act(self->holders); act(self->keys);                  \
    act(self->values); act(self->sized); act(self->lengths); act(self->tensors);                   \
    act(self->layouts)

/* The place where an object keeps its dict or its class, or a class the order of its bases; and the
 * slot with the expected one. */
typedef struct {
    PyObject **place;
    Py_ssize_t slot;
} Own;

/* A check may run Python: readers, and the methods of keys and of containers. That may do anything,
 * even change the lists, so their sizes are checked at every read; their items are compared and
 * never used. The tuples stay: see `clear`. */
typedef struct {
    PyObject_HEAD
    PyObject *readers, *expected; /* tuples: callables, and the object each must return */
    PyObject *holders, *keys;     /* tuples: dicts, lists, cells, objects, and their keys */
    PyObject *values;             /* list: an equal value may take the place of another */
    PyObject *sized;              /* tuple: containers that must not grow or shrink */
    PyObject *lengths;            /* list: of `sized` */
    PyObject *tensors;            /* tuple, kept alive */
    PyObject *layouts;            /* tuple: of `tensors`; see `remember` */
    int checking;                 /* number of checks under way */
    Own *own;
    Py_ssize_t owns;
    Py_ssize_t watched, watched_sized; /* the first holders and sized are watched dicts: how many */
    uint64_t seen; /* `changes` when the watched dicts were last found as expected */
    Memory *memory;
    Py_ssize_t count;
} Guard;

/* Since Python 3.12 a dict can be watched: then its entries need no check at every call. A change
 * of any watched dict makes every guard check once more. */
static uint64_t changes = 1;
static int watcher = -1;

#if PY_VERSION_HEX >= 0x030C0000
static int notice(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value)
{
    (void)event, (void)dict, (void)key, (void)value;
    changes++;
    return 0;
}
#endif

static int watch(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030C0000
    if (watcher >= 0)
        return PyDict_Watch(watcher, dict);
#endif
    if (PyDict_Check(dict))
        return 0;
    PyErr_Format(PyExc_TypeError, "cannot watch a %s", Py_TYPE(dict)->tp_name);
    return -1;
}

static int same_data(const Memory *m)
{
    void *data;
    int64_t dim;
    int32_t dtype;
    return !torch.data(m->tensor, &data) && data == m->data && !torch.dim(m->tensor, &dim) &&
           dim == m->dim && !torch.dtype(m->tensor, &dtype) && dtype == m->dtype;
}

/* 1 or 0; -1, an exception; 2, a mode of torch functions returned something else. */
static int requires_grad(PyObject *tensor)
{
    PyObject *value = torch.requires_grad->get(tensor, torch.requires_grad->closure);
    int found = !value ? -1 : value == Py_True ? 1 : value == Py_False ? 0 : 2;
    Py_XDECREF(value);
    return found;
}

/* Copy sizes or strides, a tuple of numbers. */
static int copy_numbers(int64_t *to, PyObject *from)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from); i++) {
        to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(from, i));
        if (to[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* Take the layout that is expected of a tensor: its class, address, dtype as torch numbers it, sizes,
 * strides, and whether it requires grad, or None. */
static int remember(Memory *m, PyObject *tensor, PyObject *layout)
{
    PyObject *type, *shape, *steps, *grad;
    unsigned long long data;
    if (!PyObject_TypeCheck(tensor, torch.type)) {
        PyErr_Format(PyExc_TypeError, "a %s is no tensor", Py_TYPE(tensor)->tp_name);
        return -1;
    }
    if (!PyTuple_Check(layout)) {
        PyErr_Format(PyExc_TypeError, "a %s is no layout", Py_TYPE(layout)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(layout, "O!KiO!O!O", &PyType_Type, &type, &data, &m->dtype, &PyTuple_Type,
                          &shape, &PyTuple_Type, &steps, &grad))
        return -1;
    m->object = tensor;
    m->type = (PyTypeObject *)type;
    m->tensor = (char *)tensor + torch.place;
    m->data = (void *)(uintptr_t)data;
    m->dim = PyTuple_GET_SIZE(shape);
    m->requires_grad = grad == Py_None ? -1 : grad == Py_True;
    if (PyTuple_GET_SIZE(steps) != m->dim) {
        PyErr_SetString(PyExc_ValueError, "a layout has as many strides as sizes");
        return -1;
    }
    m->layout = PyMem_Malloc(2 * (size_t)m->dim * sizeof(int64_t) + 1);
    if (!m->layout) {
        PyErr_NoMemory();
        return -1;
    }
    if (copy_numbers(m->layout, shape) || copy_numbers(m->layout + m->dim, steps))
        return -1;
    int64_t *sizes, *strides, dim;
    m->inside = *(void **)m->tensor;
    if (m->dim <= FEW && !torch.dim(m->tensor, &dim) && dim == m->dim &&
        !torch.sizes(m->tensor, &sizes) && !torch.strides(m->tensor, &strides) &&
        (uintptr_t)sizes - (uintptr_t)m->inside < NEAR) {
        m->sizes = sizes;
        m->strides = strides;
    }
    return 0;
}

static int unmoved(const Memory *m)
{
    int64_t *sizes = m->sizes, *strides = m->strides;
    if (Py_TYPE(m->object) != m->type || !same_data(m))
        return 0;
    if ((!sizes || *(void **)m->tensor != m->inside) &&
        (torch.sizes(m->tensor, &sizes) || torch.strides(m->tensor, &strides)))
        return 0;
    for (int64_t i = 0; i < m->dim; i++)
        if (sizes[i] != m->layout[i] || strides[i] != m->layout[m->dim + i])
            return 0;
    return 1;
}

/* Each of these returns 1: as captured; 0: not; -1: an exception. */

static int same_modes(Guard *self)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->readers); i++) {
        PyObject *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->readers, i));
        if (!value)
            return -1;
        int same = value == PyTuple_GET_ITEM(self->expected, i);
        Py_DECREF(value);
        if (!same)
            return 0;
    }
    return 1;
}

/* The dict and the class of each object, read from their place: 1 ns. No watcher reports a new
 * dict, `o.__dict__ = {...}`, and the old one is not changed by it. */
static int same_own(Guard *self)
{
    if (PyList_GET_SIZE(self->values) != PyTuple_GET_SIZE(self->holders))
        return 0;
    for (Py_ssize_t i = 0; i < self->owns; i++)
        if (*self->own[i].place != PyList_GET_ITEM(self->values, self->own[i].slot))
            return 0;
    return 1;
}

static PyObject *part_of(PyObject *function, Py_ssize_t index)
{
    PyObject *part = index == 0   ? PyFunction_GET_CODE(function)
                     : index == 1 ? PyFunction_GET_DEFAULTS(function)
                                  : PyFunction_GET_KW_DEFAULTS(function);
    return part ? part : Py_None;
}

/* The content of a slot, or NULL; borrowed: it is compared and never used. */
static PyObject *look_up(PyObject *holder, PyObject *key)
{
    if (PyDict_Check(holder))
        return PyDict_GetItemWithError(holder, key);
    if (PyCell_Check(holder))
        return PyCell_GET(holder);
    if (PyContextVar_CheckExact(holder)) {
        PyObject *value = NULL;
        if (!PyContextVar_Get(holder, NULL, &value))
            Py_XDECREF(value); /* the context or the variable holds it */
        return value;
    }
    Py_ssize_t index = PyLong_AsSsize_t(key); /* `known` has checked it */
    if (PyFunction_Check(holder))
        return part_of(holder, index);
    return index >= 0 && index < PyList_GET_SIZE(holder) ? PyList_GET_ITEM(holder, index) : NULL;
}

/* The same keys in a dict, in the same order. */
static int same_keys(PyObject *dict, PyObject *keys)
{
    Py_ssize_t place = 0, count = 0;
    PyObject *key;
    if (!PyTuple_Check(keys) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys))
        return 0;
    while (PyDict_Next(dict, &place, &key, NULL))
        if (key != PyTuple_GET_ITEM(keys, count++))
            return 0;
    return 1;
}

static int is_own(PyObject *holder, PyObject *key)
{
    return key == vars_of || key == (PyObject *)&PyType_Type || PyType_Check(holder);
}

static int same_values(Guard *self, Py_ssize_t from, Py_ssize_t to)
{
    for (Py_ssize_t i = from; i < to; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *holder = PyTuple_GET_ITEM(self->holders, i);
        if (is_own(holder, key))
            continue; /* same_own */
        if (key == (PyObject *)&PyTuple_Type) {
            if (i >= PyList_GET_SIZE(self->values) ||
                !same_keys(holder, PyList_GET_ITEM(self->values, i)))
                return 0;
            continue;
        }
        PyObject *value = look_up(holder, key);
        if (!value) {
            if (PyErr_Occurred())
                return -1;
            value = missing;
        }
        if (i >= PyList_GET_SIZE(self->values) || value != PyList_GET_ITEM(self->values, i))
            return 0;
    }
    return 1;
}

static int same_lengths(Guard *self, Py_ssize_t from, Py_ssize_t to)
{
    for (Py_ssize_t i = from; i < to; i++) {
        Py_ssize_t found = PyObject_Size(PyTuple_GET_ITEM(self->sized, i));
        if (found < 0)
            return -1;
        if (i >= PyList_GET_SIZE(self->lengths))
            return 0;
        Py_ssize_t length = PyLong_AsSsize_t(PyList_GET_ITEM(self->lengths, i));
        if (length == -1 && PyErr_Occurred())
            return -1;
        if (found != length)
            return 0;
    }
    return 1;
}

static int same_state(Guard *self)
{
    if (!same_own(self))
        return 0;
    if (watcher < 0 || self->seen != changes) {
        uint64_t now = changes;
        int same = same_lengths(self, 0, self->watched_sized);
        if (same > 0)
            same = same_values(self, 0, self->watched);
        if (same <= 0)
            return same;
        self->seen = now;
    }
    int same = same_lengths(self, self->watched_sized, PyTuple_GET_SIZE(self->sized));
    return same > 0 ? same_values(self, self->watched, PyTuple_GET_SIZE(self->holders)) : same;
}

static int same_tensors(Guard *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (!unmoved(&self->memory[i]))
            return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (self->memory[i].requires_grad < 0)
            continue;
        int now = requires_grad(PyTuple_GET_ITEM(self->tensors, i));
        if (now != self->memory[i].requires_grad)
            return now < 0 ? -1 : 0;
    }
    return 1;
}

static PyObject *check(Guard *self, PyObject *Py_UNUSED(none))
{
    if (!self->readers)
        Py_RETURN_FALSE; /* cleared by the garbage collector */
    self->checking++;
    int modes = same_modes(self);
    int state = modes > 0 ? same_state(self) : 0;
    int tensors = state > 0 ? same_tensors(self) : 0;
    self->checking--;
    if (modes < 0 || state < 0 || tensors < 0)
        return NULL;
    if (modes && !state)
        Py_RETURN_NONE;
    return PyBool_FromLong(tensors);
}

static int visit(Guard *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    EACH_PART(Py_VISIT);
    return 0;
}

static int clear(Guard *self)
{
    if (self->checking)
        return 0; /* the collector will try again */
    PyMem_Free(self->own);
    self->own = NULL;
    self->owns = 0;
    for (Py_ssize_t i = 0; i < self->count; i++)
        PyMem_Free(self->memory[i].layout);
    PyMem_Free(self->memory);
    self->memory = NULL;
    self->count = 0;
    EACH_PART(Py_CLEAR);
    return 0;
}

static void dealloc(Guard *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* 0 if `look_up` can read this slot; -1 with an exception if not. */
static int known(PyObject *holder, PyObject *key)
{
    if (PyDict_Check(holder) || PyCell_Check(holder) || PyContextVar_CheckExact(holder))
        return 0;
    if (PyFunction_Check(holder) || PyList_Check(holder)) {
        Py_ssize_t index = PyLong_AsSsize_t(key);
        if (index == -1 && PyErr_Occurred())
            return -1;
        if (PyList_Check(holder) || (index >= 0 && index <= 2))
            return 0;
    }
    PyErr_Format(PyExc_TypeError, "cannot look into a %s", Py_TYPE(holder)->tp_name);
    return -1;
}

/* Find the places where the objects keep their dicts and classes, which are fixed from then on: a
 * new class must have the same layout, and so does not move the place. */
static int find_own(Guard *self)
{
    Py_ssize_t holders = PyTuple_GET_SIZE(self->holders);
    self->own = PyMem_Calloc((size_t)holders + 1, sizeof(Own));
    if (!self->own)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < holders; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *holder = PyTuple_GET_ITEM(self->holders, i);
        if (!is_own(holder, key))
            continue;
        PyObject **place = (PyObject **)&holder->ob_type;
        if (key == vars_of)
            place = _PyObject_GetDictPtr(holder); /* makes the dict if there is none yet */
        else if (key != (PyObject *)&PyType_Type)
            place = &((PyTypeObject *)holder)->tp_mro;
        if (!place) {
            PyErr_Format(PyExc_TypeError, "a %s has no dict", Py_TYPE(holder)->tp_name);
            return -1;
        }
        self->own[self->owns++] = (Own){place, i};
    }
    return 0;
}

/* Do the part of the construction that can fail, once the guard owns its objects. */
static int prepare(Guard *self)
{
    Py_ssize_t holders = PyTuple_GET_SIZE(self->holders), sized = PyTuple_GET_SIZE(self->sized);
    if (PyTuple_GET_SIZE(self->readers) != PyTuple_GET_SIZE(self->expected) ||
        holders != PyTuple_GET_SIZE(self->keys) || holders != PyList_GET_SIZE(self->values) ||
        sized != PyList_GET_SIZE(self->lengths) || self->watched < 0 || self->watched > holders ||
        self->watched_sized < 0 || self->watched_sized > sized ||
        PyTuple_GET_SIZE(self->tensors) != PyTuple_GET_SIZE(self->layouts)) {
        PyErr_SetString(PyExc_ValueError, "lengths differ");
        return -1;
    }
    for (Py_ssize_t i = 0; i < holders; i++) {
        PyObject *holder = PyTuple_GET_ITEM(self->holders, i);
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        if (is_own(holder, key) && i >= self->watched)
            continue;
        if (known(holder, key) || (i < self->watched && watch(holder)))
            return -1;
    }
    for (Py_ssize_t i = 0; i < self->watched_sized; i++)
        if (watch(PyTuple_GET_ITEM(self->sized, i)))
            return -1;
    if (find_own(self))
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(self->tensors);
    self->memory = PyMem_Calloc((size_t)count + 1, sizeof(Memory));
    if (!self->memory)
        return PyErr_NoMemory(), -1;
    while (self->count < count) { /* counted first: `clear` frees what it has so far */
        Py_ssize_t i = self->count++;
        if (remember(&self->memory[i], PyTuple_GET_ITEM(self->tensors, i),
                     PyTuple_GET_ITEM(self->layouts, i)))
            return -1;
    }
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *readers, *expected, *holders, *keys, *values, *sized, *lengths, *tensors, *layouts;
    Py_ssize_t watched, watched_sized;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!nO!O!nO!O!", &PyTuple_Type, &readers, &PyTuple_Type,
                          &expected, &PyTuple_Type, &holders, &PyTuple_Type, &keys, &PyList_Type,
                          &values, &watched, &PyTuple_Type, &sized, &PyList_Type, &lengths,
                          &watched_sized, &PyTuple_Type, &tensors, &PyTuple_Type, &layouts))
        return NULL;
    if (!torch.data) {
        PyErr_SetString(PyExc_RuntimeError, "connect() comes first");
        return NULL;
    }
    Guard *self = (Guard *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->readers = Py_NewRef(readers);
    self->expected = Py_NewRef(expected);
    self->holders = Py_NewRef(holders);
    self->keys = Py_NewRef(keys);
    self->values = Py_NewRef(values);
    self->watched = watched;
    self->watched_sized = watched_sized;
    self->sized = Py_NewRef(sized);
    self->lengths = Py_NewRef(lengths);
    self->tensors = Py_NewRef(tensors);
    self->layouts = Py_NewRef(layouts);
    if (prepare(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef guard_methods[] = {
    {"check", (PyCFunction)check, METH_NOARGS,
     "True: all is as captured. None: a slot or length differs, perhaps harmlessly. False: not."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot guard_slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, visit},
    {Py_tp_clear, clear},
    {Py_tp_methods, guard_methods},
    {0, NULL},
};

static PyType_Spec guard_spec = {
    .name = "onelaunch_guard.Guard",
    .basicsize = sizeof(Guard),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = guard_slots,
};

static PyObject *connect(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t data, sizes, strides, dim, dtype, place;
    PyObject *grad, *nothing;
    if (!PyArg_ParseTuple(args, "nnnnnnO!O", &data, &sizes, &strides, &dim, &dtype, &place,
                          &PyGetSetDescr_Type, &grad, &nothing))
        return NULL;
    Py_XSETREF(missing, Py_NewRef(nothing));
    torch.data = (get_pointer)data;
    torch.sizes = (get_numbers)sizes;
    torch.strides = (get_numbers)strides;
    torch.dim = (get_number)dim;
    torch.dtype = (get_dtype)dtype;
    torch.place = place;
    torch.requires_grad = ((PyGetSetDescrObject *)grad)->d_getset;
    torch.type = PyDescr_TYPE(grad); /* both live as long as torch */
    Py_RETURN_NONE;
}

static PyObject *dtype(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    int32_t found;
    if (!torch.type || !PyObject_TypeCheck(tensor, torch.type) ||
        torch.dtype((char *)tensor + torch.place, &found)) {
        PyErr_SetString(PyExc_TypeError, "no tensor with a dtype");
        return NULL;
    }
    return PyLong_FromLong(found);
}

static PyObject *unwatch(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#if PY_VERSION_HEX >= 0x030C0000
    if (watcher >= 0 && PyDict_ClearWatcher(watcher))
        return NULL;
#endif
    watcher = -1;
    Py_RETURN_NONE;
}

/* Whether the items of a tuple at these places are these objects. `all(map(is_, ...))` takes 7 us
 * for the parameters of ResNet-50, which are arguments of each call of a compiled graph. */
static PyObject *holds(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t count)
{
    if (count != 3 || !PyTuple_Check(given[0]) || !PyBytes_Check(given[1]) ||
        !PyTuple_Check(given[2]) ||
        PyBytes_GET_SIZE(given[1]) != PyTuple_GET_SIZE(given[2]) * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_TypeError, "no tuple, places of int64, and tuple of objects there");
        return NULL;
    }
    const int64_t *places = (const int64_t *)PyBytes_AS_STRING(given[1]);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[2]); i++)
        if (places[i] < 0 || places[i] >= PyTuple_GET_SIZE(given[0]) ||
            PyTuple_GET_ITEM(given[0], places[i]) != PyTuple_GET_ITEM(given[2], i))
            Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"holds", (PyCFunction)(void (*)(void))holds, METH_FASTCALL,
     "Whether objects are at their places in a tuple."},
    {"connect", connect, METH_VARARGS, "Give the addresses of torch's functions."},
    {"dtype", dtype, METH_O, "The number that torch's C interface has for a tensor's dtype."},
    {"unwatch", unwatch, METH_NOARGS, "Watch no dicts: read each at every call."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_guard", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_guard(void)
{
    PyObject *builtins = PyEval_GetBuiltins();
    vars_of = PyMapping_GetItemString(builtins, "vars");
    PyObject *module = vars_of ? PyModule_Create(&definition) : NULL;
    if (!module)
        return NULL;
    PyObject *type = PyType_FromSpec(&guard_spec);
    if (!type || PyModule_AddObject(module, "Guard", type)) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030C0000
    watcher = PyDict_AddWatcher(notice);
    if (watcher < 0)
        PyErr_Clear(); /* all eight watchers are taken: check at every call */
#endif
    return module;
}
