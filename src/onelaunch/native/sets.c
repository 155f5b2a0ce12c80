/* A set as a copy of another down to its table.
 *
 * Where its elements lie decides the order of iteration and what `pop` takes. A set that is filled
 * anew has another order, as its table has another size.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define IS_ELEMENT(entry) ((entry)->key && (entry)->hash != -1) /* -1: one was removed here */

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *target, *source;
    if (!PyArg_ParseTuple(args, "O!O!", &PySet_Type, &target, &PySet_Type, &source))
        return NULL;
    if (target == source)
        Py_RETURN_NONE;
    do { /* a finalizer of an element may add another */
        if (PySet_Clear(target) < 0)
            return NULL;
    } while (((PySetObject *)target)->fill);
    PySetObject *to = (PySetObject *)target, *from = (PySetObject *)source;
    size_t bytes = (size_t)(from->mask + 1) * sizeof(setentry);
    setentry *table = to->smalltable;
    if (from->table != from->smalltable && !(table = PyMem_Malloc(bytes)))
        return PyErr_NoMemory();
    memcpy(table, from->table, bytes);
    for (Py_ssize_t i = 0; i <= from->mask; i++)
        if (IS_ELEMENT(&table[i]))
            Py_INCREF(table[i].key);
    to->table = table;
    to->fill = from->fill;
    to->used = from->used;
    to->mask = from->mask;
    to->finger = from->finger;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "Make the first set a copy of the second."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "onelaunch_sets", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_onelaunch_sets(void) { return PyModule_Create(&definition); }
