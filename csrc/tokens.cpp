#include "tokens.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace lmkv {
namespace {

[[noreturn]] void refuse(std::size_t position, const std::string& why) {
    throw nanobind::value_error(("token " + std::to_string(position) + " " + why).c_str());
}

std::uint32_t in_range(long long value, std::size_t position) {
    if (value < 0 || value > 0xFFFFFFFFLL) refuse(position, "is outside [0, 2**32)");
    return static_cast<std::uint32_t>(value);
}

// Fills out[at, n) up to the first item that is no small int; returns where that is. No Python code runs
// meanwhile, so the items can be read where they lie.
std::size_t small_ints([[maybe_unused]] PyObject* sequence, std::size_t at, [[maybe_unused]] std::size_t start,
                       [[maybe_unused]] std::size_t n, [[maybe_unused]] std::uint32_t* out) {
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000
    PyObject* const* const items = PySequence_Fast_ITEMS(sequence) + start;
    const auto size = static_cast<std::size_t>(Py_SIZE(sequence));
    for (n = std::min(n, size - std::min(size, start)); at < n; ++at) {
        PyObject* const item = items[at];
        const auto digits = static_cast<std::size_t>(Py_SIZE(item));
        if (!PyLong_CheckExact(item) || digits > 1) break;
        out[at] = digits ? reinterpret_cast<PyLongObject*>(item)->ob_digit[0] : 0;
    }
#endif
    return at;
}

// The item at i (borrowed), null when the sequence has shrunk meanwhile.
PyObject* item_at(PyObject* sequence, std::size_t i) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* const item = PyList_Check(sequence) ? PyList_GetItem(sequence, at) : PyTuple_GetItem(sequence, at);
    if (!item) PyErr_Clear();
    return item;
}

std::uint32_t value_of(PyObject* item, std::size_t position) {
    nanobind::object number = nanobind::borrow(item);  // __index__ may change the list
    if (!PyLong_CheckExact(item)) {
        if (PyBool_Check(item)) refuse(position, "is a bool");
        number = nanobind::steal(PyNumber_Index(item));
        if (!number.is_valid()) {
            PyErr_Clear();
            refuse(position, "is not an integer");
        }
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    return in_range(overflow ? -1 : value, position);
}

template <typename T>
void convert(const char* data, std::ptrdiff_t stride, std::size_t n, std::uint32_t* out) {
    for (std::size_t i = 0; i < n; ++i, data += stride) {
        T value;
        std::memcpy(&value, data, sizeof value);
        if constexpr (sizeof(T) < 4 && std::is_unsigned_v<T>)
            out[i] = value;
        else
            out[i] = in_range(static_cast<long long>(value), i);
    }
}

}  // namespace

void tokens_from_items(PyObject* sequence, std::size_t start, std::size_t n, std::uint32_t* out) {
    for (std::size_t i = 0; (i = small_ints(sequence, i, start, n, out)) < n; ++i) {
        PyObject* const item = item_at(sequence, start + i);
        if (!item) refuse(i, "is gone: the list changed while it was read");
        out[i] = value_of(item, i);
    }
}

void tokens_from_array(const char* data, bool is_signed, std::size_t itemsize, std::ptrdiff_t stride, std::size_t n,
                       std::uint32_t* out) {
    const auto as = [&](auto item) {
        using Signed = decltype(item);
        if (is_signed)
            convert<Signed>(data, stride, n, out);
        else
            convert<std::make_unsigned_t<Signed>>(data, stride, n, out);
    };
    switch (itemsize) {
        case 1: return as(std::int8_t{});
        case 2: return as(std::int16_t{});
        case 4: return as(std::int32_t{});
        default: return as(std::int64_t{});
    }
}

}  // namespace lmkv
