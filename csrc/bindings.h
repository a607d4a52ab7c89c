// What the files of lmkv._native share: buffers, the GIL, refusals.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace nb = nanobind;

namespace lmkv {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kReleaseBytes = 64 * 1024;

// Gives up the GIL for the scope when the work is worth it.
class Unlocked {
  public:
    explicit Unlocked(bool worth = true) {
        if (worth) release_.emplace();
    }

  private:
    std::optional<nb::gil_scoped_release> release_;
};

// Any Python buffer, held for the scope.
class Bytes {
  public:
    explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }
    const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
    std::uint8_t* mutable_data() const { return static_cast<std::uint8_t*>(view_.buf); }  // of a writable buffer
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }
    const Py_buffer& view() const { return view_; }

  private:
    Py_buffer view_;
};

[[noreturn]] inline void bad_value(const std::string& what) { throw nb::value_error(what.c_str()); }

// The codecs' functions (bindings_codec.cpp).
void bind_codecs(nb::module_& m);

}  // namespace lmkv
