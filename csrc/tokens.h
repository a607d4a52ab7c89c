// Token ids from whatever Python has them in, as unsigned 32-bit words.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace lmkv {

// Fills out[n] from the items of a list or tuple of n integers in [0, 2^32).
// Throws nanobind::value_error naming the position of the first item that is none (bool included).
void tokens_from_items(PyObject* sequence, std::size_t n, std::uint32_t* out);

// Fills out[n] from n integers of struct-module format `format`, `stride` bytes apart. Throws the
// same; false when the format is not a native integer one.
bool tokens_from_buffer(const char* format, const char* data, std::ptrdiff_t stride, std::size_t n,
                        std::uint32_t* out);

}  // namespace lmkv
