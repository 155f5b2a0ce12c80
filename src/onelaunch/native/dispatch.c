/* The way of a call of `region.Region` to the recordings of its parameters.
 *
 * Dynamo passes each parameter of a model as an argument, hundreds of them. Which program they are
 * of is told by identity alone: nothing of a tensor is read, and no tuple of them is made.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

/* So many arguments are passed on without memory of the heap. */
#define FEW 32

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *programs;  /* list of tuples: places, as bytes of int64; the objects that are to be
                            there; the places of the other arguments; a callable of these */
    PyObject *otherwise; /* a callable of all arguments */
} Dispatch;

enum { FIXED, GIVEN, MOVING, RUN, PARTS };

static const int64_t *places(PyObject *bytes, Py_ssize_t *count)
{
    *count = PyBytes_GET_SIZE(bytes) / (Py_ssize_t)sizeof(int64_t);
    return (const int64_t *)PyBytes_AS_STRING(bytes);
}

static int fits(PyObject *program, PyObject *const *args, Py_ssize_t given)
{
    Py_ssize_t count;
    const int64_t *fixed = places(PyTuple_GET_ITEM(program, FIXED), &count);
    PyObject *expected = PyTuple_GET_ITEM(program, GIVEN);
    Py_ssize_t others;
    const int64_t *moving = places(PyTuple_GET_ITEM(program, MOVING), &others);
    if (others && moving[others - 1] >= given) /* they ascend */
        return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (fixed[i] >= given || args[fixed[i]] != PyTuple_GET_ITEM(expected, i))
            return 0;
    return 1;
}

static PyObject *run(PyObject *program, PyObject *const *args)
{
    PyObject *few[FEW], **others = few;
    Py_ssize_t count;
    const int64_t *moving = places(PyTuple_GET_ITEM(program, MOVING), &count);
    if (count > FEW && !(others = PyMem_Malloc((size_t)count * sizeof(PyObject *))))
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++)
        others[i] = args[moving[i]];
    PyObject *function = PyTuple_GET_ITEM(program, RUN);
    PyObject *result = PyObject_Vectorcall(function, others, (size_t)count, NULL);
    if (others != few)
        PyMem_Free(others);
    return result;
}

static PyObject *call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Dispatch *self = (Dispatch *)object;
    Py_ssize_t given = PyVectorcall_NARGS(flags);
    for (Py_ssize_t i = 0; !names && i < PyList_GET_SIZE(self->programs); i++) {
        PyObject *program = PyList_GET_ITEM(self->programs, i);
        if (!fits(program, args, given))
            continue;
        Py_INCREF(program); /* what runs may take it off the list */
        PyObject *result = run(program, args);
        Py_DECREF(program);
        return result;
    }
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
}

static PyObject *add(Dispatch *self, PyObject *program)
{
    int whole = PyTuple_CheckExact(program) && PyTuple_GET_SIZE(program) == PARTS &&
                PyBytes_CheckExact(PyTuple_GET_ITEM(program, FIXED)) &&
                PyTuple_CheckExact(PyTuple_GET_ITEM(program, GIVEN)) &&
                PyBytes_CheckExact(PyTuple_GET_ITEM(program, MOVING));
    if (whole) {
        Py_ssize_t count;
        places(PyTuple_GET_ITEM(program, FIXED), &count);
        whole = count == PyTuple_GET_SIZE(PyTuple_GET_ITEM(program, GIVEN));
    }
    if (!whole) {
        PyErr_SetString(PyExc_TypeError, "no program");
        return NULL;
    }
    if (PyList_Append(self->programs, program))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *forget(Dispatch *self, PyObject *Py_UNUSED(none))
{
    if (PyList_SetSlice(self->programs, 0, PyList_GET_SIZE(self->programs), NULL))
        return NULL;
    Py_RETURN_NONE;
}

/* No `clear`: cycles lead through the region, whose dict is cleared. */
static int visit(Dispatch *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->programs);
    Py_VISIT(self->otherwise);
    return 0;
}

static void dealloc(Dispatch *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->programs);
    Py_XDECREF(self->otherwise);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *otherwise;
    if (!PyArg_ParseTuple(args, "O", &otherwise))
        return NULL;
    Dispatch *self = (Dispatch *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = call;
    self->otherwise = Py_NewRef(otherwise);
    self->programs = PyList_New(0);
    if (!self->programs) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef dispatch_methods[] = {
    {"add", (PyCFunction)add, METH_O, "Have calls with these objects run this callable."},
    {"forget", (PyCFunction)forget, METH_NOARGS, "Forget all programs."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Dispatch, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot dispatch_slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, visit},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, dispatch_methods},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec dispatch_spec = {
    .name = "onelaunch_dispatch.Dispatch",
    .basicsize = sizeof(Dispatch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = dispatch_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_dispatch", NULL, -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_dispatch(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    PyObject *type = PyType_FromSpec(&dispatch_spec);
    if (!type || PyModule_AddObject(module, "Dispatch", type)) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
