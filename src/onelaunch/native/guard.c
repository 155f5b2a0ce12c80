/* The check of `guard.StateGuard`, without an interpreter loop around it.
 *
 * A recording of ResNet-50 relies on 2,000 slots and 320 tensors, far too many for Python. It sees a
 * tensor through the C interface that libtorch exports and keeps stable (aoti_torch_*), and
 * needs no header of torch: `place` is where, in the Python object, the one pointer lies that an
 * at::Tensor consists of.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef int32_t (*get_pointer)(void *, void **);
typedef int32_t (*get_numbers)(void *, int64_t **);
typedef int32_t (*get_number)(void *, int64_t *);
typedef int32_t (*get_dtype)(void *, int32_t *);

static PyObject *vars_of; /* the builtin `vars` */

static struct {
    get_pointer data;
    get_numbers sizes, strides;
    get_number dim;
    get_dtype dtype;
    Py_ssize_t place;
    PyGetSetDef *requires_grad;
} torch;

typedef struct {
    void *tensor;
    void *data;
    int64_t dim;
    int64_t *layout; /* sizes, then strides */
    int32_t dtype;
    PyObject *requires_grad; /* True or False; NULL where it does not matter */
} Memory;

typedef struct {
    PyObject_HEAD
    PyObject *readers, *expected; /* tuples: callables, and the very object each returns */
    PyObject *holders, *keys;     /* tuples: dicts, lists, cells, objects, and what to look up */
    PyObject *values;             /* list: an equal value may take the place of another */
    PyObject *sized;              /* tuple: containers that must not grow or shrink */
    PyObject *lengths;            /* list: of `sized` */
    PyObject *tensors;            /* tuple, kept alive */
    int grads;                    /* whether it matters that a tensor requires grad */
    /* So many of the holders and of the sized, the first, are dicts that tell when they change, */
    Py_ssize_t watched, watched_sized;
    uint64_t seen; /* and these are the `changes` at which they were last found as expected. */
    Memory *memory;
    Py_ssize_t count;
} Guard;

/* Since Python 3.12 a dict can tell that it changes: then its entries need no look at every call.
 * Any change of any watched dict makes every guard look once more. */
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
    (void)dict;
    return 0;
}

static int describe(Memory *m, int64_t **sizes, int64_t **strides)
{
    return torch.data(m->tensor, &m->data) || torch.dim(m->tensor, &m->dim) ||
           torch.dtype(m->tensor, &m->dtype) || torch.sizes(m->tensor, sizes) ||
           torch.strides(m->tensor, strides);
}

/* A borrowed True or False, both of which live for ever. */
static PyObject *requires_grad(PyObject *tensor)
{
    PyObject *value = torch.requires_grad->get(tensor, torch.requires_grad->closure);
    Py_XDECREF(value);
    return value;
}

static int remember(Memory *m, PyObject *tensor, int grads)
{
    int64_t *sizes, *strides;
    m->tensor = (char *)tensor + torch.place;
    if (grads && !(m->requires_grad = requires_grad(tensor)))
        return -1;
    if (describe(m, &sizes, &strides)) {
        PyErr_SetString(PyExc_TypeError, "a tensor without memory cannot be guarded");
        return -1;
    }
    size_t bytes = (size_t)m->dim * sizeof(int64_t);
    m->layout = PyMem_Malloc(2 * bytes + 1);
    if (!m->layout) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(m->layout, sizes, bytes);
    memcpy(m->layout + m->dim, strides, bytes);
    return 0;
}

static int unmoved(const Memory *m)
{
    Memory now = {.tensor = m->tensor};
    int64_t *sizes, *strides;
    if (describe(&now, &sizes, &strides) || now.data != m->data || now.dim != m->dim ||
        now.dtype != m->dtype)
        return 0;
    size_t bytes = (size_t)m->dim * sizeof(int64_t);
    return !memcmp(sizes, m->layout, bytes) && !memcmp(strides, m->layout + m->dim, bytes);
}

/* Each of these: 1, as captured; 0, not; -1, an exception. */

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

/* What a slot holds, borrowed: it is compared and never used. */
static PyObject *look_up(PyObject *holder, PyObject *key)
{
    if (key == (PyObject *)&PyType_Type)
        return (PyObject *)Py_TYPE(holder);
    if (key == vars_of) {
        PyObject *dict = PyObject_GenericGetDict(holder, NULL);
        Py_XDECREF(dict);
        return dict;
    }
    if (PyDict_Check(holder))
        return PyDict_GetItemWithError(holder, key);
    if (PyCell_Check(holder))
        return PyCell_GET(holder);
    Py_ssize_t index = PyLong_AsSsize_t(key);
    if (PyFunction_Check(holder))
        return index == 0   ? PyFunction_GET_CODE(holder)
               : index == 1 ? PyFunction_GET_DEFAULTS(holder)
                            : PyFunction_GET_KW_DEFAULTS(holder);
    return index >= 0 && index < PyList_GET_SIZE(holder) ? PyList_GET_ITEM(holder, index) : NULL;
}

static int same_values(Guard *self, Py_ssize_t from, Py_ssize_t to)
{
    for (Py_ssize_t i = from; i < to; i++) {
        PyObject *value =
            look_up(PyTuple_GET_ITEM(self->holders, i), PyTuple_GET_ITEM(self->keys, i));
        if (value != PyList_GET_ITEM(self->values, i))
            return PyErr_Occurred() ? -1 : 0;
    }
    return 1;
}

static int same_lengths(Guard *self, Py_ssize_t from, Py_ssize_t to)
{
    for (Py_ssize_t i = from; i < to; i++) {
        Py_ssize_t length = PyLong_AsSsize_t(PyList_GET_ITEM(self->lengths, i));
        if (PyObject_Size(PyTuple_GET_ITEM(self->sized, i)) != length)
            return PyErr_Occurred() ? -1 : 0;
    }
    return 1;
}

static int same_state(Guard *self)
{
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

static PyObject *check(Guard *self, PyObject *Py_UNUSED(none))
{
    if (!self->readers)
        Py_RETURN_FALSE; /* cleared by the garbage collector */
    int same = same_modes(self);
    if (same < 0)
        return NULL;
    if (!same)
        Py_RETURN_FALSE;
    same = same_state(self);
    if (same < 0)
        return NULL;
    if (!same)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (!unmoved(&self->memory[i]))
            Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; self->grads && i < self->count; i++) {
        PyObject *now = requires_grad(PyTuple_GET_ITEM(self->tensors, i));
        if (!now)
            return NULL;
        if (now != self->memory[i].requires_grad)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int visit(Guard *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->readers);
    Py_VISIT(self->expected);
    Py_VISIT(self->holders);
    Py_VISIT(self->keys);
    Py_VISIT(self->values);
    Py_VISIT(self->sized);
    Py_VISIT(self->lengths);
    Py_VISIT(self->tensors);
    return 0;
}

static int clear(Guard *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        PyMem_Free(self->memory[i].layout);
    PyMem_Free(self->memory);
    self->memory = NULL;
    self->count = 0;
    Py_CLEAR(self->readers);
    Py_CLEAR(self->expected);
    Py_CLEAR(self->holders);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->values);
    Py_CLEAR(self->sized);
    Py_CLEAR(self->lengths);
    Py_CLEAR(self->tensors);
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

/* Fill in what can fail, once the guard owns its parts. */
static int prepare(Guard *self)
{
    Py_ssize_t holders = PyTuple_GET_SIZE(self->holders), sized = PyTuple_GET_SIZE(self->sized);
    if (PyTuple_GET_SIZE(self->readers) != PyTuple_GET_SIZE(self->expected) ||
        holders != PyTuple_GET_SIZE(self->keys) || holders != PyList_GET_SIZE(self->values) ||
        sized != PyList_GET_SIZE(self->lengths) || self->watched > holders ||
        self->watched_sized > sized) {
        PyErr_SetString(PyExc_ValueError, "lengths differ");
        return -1;
    }
    for (Py_ssize_t i = 0; i < holders; i++) {
        PyObject *holder = PyTuple_GET_ITEM(self->holders, i);
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        int known = PyDict_Check(holder) || key == (PyObject *)&PyType_Type || key == vars_of ||
                    (i >= self->watched &&
                     (PyCell_Check(holder) || PyList_Check(holder) || PyFunction_Check(holder)));
        if (!known) {
            PyErr_Format(PyExc_TypeError, "cannot look into a %s", Py_TYPE(holder)->tp_name);
            return -1;
        }
        if (i < self->watched && PyDict_Check(holder) && watch(holder))
            return -1;
    }
    for (Py_ssize_t i = 0; i < self->watched_sized; i++)
        if (watch(PyTuple_GET_ITEM(self->sized, i)))
            return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(self->tensors);
    self->memory = PyMem_Calloc((size_t)count + 1, sizeof(Memory));
    if (!self->memory) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->count < count; self->count++)
        if (remember(&self->memory[self->count], PyTuple_GET_ITEM(self->tensors, self->count),
                     self->grads))
            return -1;
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *readers, *expected, *holders, *keys, *values, *sized, *lengths, *tensors;
    Py_ssize_t watched, watched_sized;
    int grads;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!nO!O!nO!p", &PyTuple_Type, &readers, &PyTuple_Type,
                          &expected, &PyTuple_Type, &holders, &PyTuple_Type, &keys, &PyList_Type,
                          &values, &watched, &PyTuple_Type, &sized, &PyList_Type, &lengths,
                          &watched_sized, &PyTuple_Type, &tensors, &grads))
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
    self->grads = grads;
    self->tensors = Py_NewRef(tensors);
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
    PyObject *grad;
    if (!PyArg_ParseTuple(args, "nnnnnnO!", &data, &sizes, &strides, &dim, &dtype, &place,
                          &PyGetSetDescr_Type, &grad))
        return NULL;
    torch.data = (get_pointer)data;
    torch.sizes = (get_numbers)sizes;
    torch.strides = (get_numbers)strides;
    torch.dim = (get_number)dim;
    torch.dtype = (get_dtype)dtype;
    torch.place = place;
    torch.requires_grad = ((PyGetSetDescrObject *)grad)->d_getset;
    Py_RETURN_NONE;
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

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "Give the addresses of torch's functions."},
    {"unwatch", unwatch, METH_NOARGS, "Trust no dict to tell: look into each at every call."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_guard", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_guard(void)
{
    PyObject *builtins = PyEval_GetBuiltins();
    vars_of = PyDict_GetItemString(builtins, "vars");
    PyObject *module = vars_of ? PyModule_Create(&definition) : NULL;
    if (!module)
        return NULL;
    Py_INCREF(vars_of);
    PyObject *type = PyType_FromSpec(&guard_spec);
    if (!type || PyModule_AddObject(module, "Guard", type)) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030C0000
    watcher = PyDict_AddWatcher(notice);
    if (watcher < 0)
        PyErr_Clear(); /* all eight are taken: look at every call */
#endif
    return module;
}
