// lmkv._native: argument checks, buffers and the GIL; the work is done in the files it includes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "blake3.h"
#include "copy.h"
#include "cpu.h"
#include "disk.h"
#include "memory.h"
#include "stream.h"
#include "tokens.h"
#include "xxh3.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

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

// Any Python buffer of contiguous bytes, held for the scope.
class Bytes {
  public:
    explicit Bytes(nb::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }
    const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }
    const Py_buffer& view() const { return view_; }

  private:
    Py_buffer view_;
};

// A path as the file system's bytes.
class Path {
  public:
    explicit Path(nb::handle path) {
        PyObject* bytes = nullptr;
        if (!PyUnicode_FSConverter(path.ptr(), &bytes)) throw nb::python_error();
        bytes_ = nb::steal<nb::bytes>(bytes);
    }
    const char* c_str() const { return bytes_.c_str(); }

  private:
    nb::bytes bytes_;
};

[[noreturn]] void bad_value(const std::string& what) {
    throw nb::value_error(what.c_str());
}

char* pointer(std::int64_t address, std::int64_t nbytes) {
    if (address <= 0) bad_value("address must be positive");
    if (nbytes < 0 || nbytes > INT64_MAX - address) bad_value("the range leaves the address space");
    return reinterpret_cast<char*>(address);
}

const std::uint8_t* digest(const nb::bytes& value, const char* name) {
    if (value.size() != lmkv::kDigestBytes) bad_value(std::string(name) + " must be 32 bytes");
    return reinterpret_cast<const std::uint8_t*>(value.c_str());
}

template <typename T>
Result<T> owned(std::unique_ptr<T[]> data, std::size_t n) {
    T* const raw = data.release();
    const nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Result<T>(raw, {n}, owner);
}

nb::list digest_list(const std::uint8_t* digests, std::size_t count) {
    nb::list out;
    for (std::size_t i = 0; i < count; ++i)
        out.append(nb::bytes(digests + i * lmkv::kDigestBytes, lmkv::kDigestBytes));
    return out;
}

// ---- memory ----

nb::object memory(std::int64_t address, std::int64_t nbytes) {
    PyObject* view = PyMemoryView_FromMemory(pointer(address, nbytes), nbytes, PyBUF_WRITE);
    if (!view) throw nb::python_error();
    return nb::steal(view);
}

void zero(std::int64_t address, std::int64_t nbytes) {
    char* const at = pointer(address, nbytes);
    const auto n = static_cast<std::size_t>(nbytes);
    const Unlocked unlocked(n > kReleaseBytes);
    std::memset(at, 0, n);
}

void touch(lmkv::Slab& slab, std::int64_t start, std::int64_t stop) {
    if (start < 0 || start > stop || static_cast<std::size_t>(stop) > slab.nbytes())
        bad_value("touch() needs 0 <= start <= stop <= nbytes");
    int error;
    {
        const Unlocked unlocked;
        error = slab.touch(static_cast<std::size_t>(start), static_cast<std::size_t>(stop));
    }
    if (error == -EBADF) bad_value("the slab is closed");
    if (error == -ENOMEM) throw std::bad_alloc();
    if (error) {
        errno = -error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

// ---- copies ----

using PlaneRows = nb::ndarray<const std::int64_t, nb::shape<-1, lmkv::kPlaneFields>, nb::c_contig,
                              nb::device::cpu>;

void make_plan(lmkv::CopyPlan* self, const PlaneRows& planes, std::int64_t payload_bytes) {
    new (self) lmkv::CopyPlan(reinterpret_cast<const lmkv::Plane*>(planes.data()), planes.shape(0),
                              payload_bytes);
}

void copy_pages(const lmkv::CopyPlan& plan, bool gather, const Vector<std::int64_t>& slots,
                const Vector<std::int64_t>& page_ids, const Vector<std::int64_t>& starts,
                const Vector<std::int64_t>& first, int threads, std::int64_t stream_bytes) {
    const std::size_t n = slots.shape(0);
    if (starts.shape(0) != n + 1 || first.shape(0) != n)
        bad_value("copy_pages() needs n slots, n first and n + 1 starts");
    if (threads < 1) bad_value("threads must be at least 1");
    const lmkv::CopyPlan::Chunks chunks{slots.data(),    first.data(),     starts.data(), n,
                                        page_ids.data(), page_ids.shape(0)};
    plan.check(chunks);
    const Unlocked unlocked;
    plan.run(chunks, gather, threads, stream_bytes);
}

// ---- hashes ----

nb::object tokens_u32(nb::handle tokens) {
    PyObject* const p = tokens.ptr();
    if (PyList_Check(p) || PyTuple_Check(p)) {
        const auto n = static_cast<std::size_t>(PyObject_Size(p));
        std::unique_ptr<std::uint32_t[]> out(new std::uint32_t[n + 1]);
        lmkv::tokens_from_items(p, n, out.get());
        return nb::cast(owned(std::move(out), n));
    }
    if (PyBytes_Check(p) || PyUnicode_Check(p) || PyByteArray_Check(p) || !PyObject_CheckBuffer(p))
        bad_value("tokens must be a list, a tuple or an array of integers");
    const Bytes buffer(tokens, PyBUF_STRIDED_RO | PyBUF_FORMAT);
    const Py_buffer& view = buffer.view();
    if (view.ndim != 1)
        bad_value("tokens must have one dimension, not " + std::to_string(view.ndim));
    const auto n = static_cast<std::size_t>(view.shape[0]);
    const std::string format = view.format ? view.format : "B";
    const bool plain = view.strides[0] == 4 && view.itemsize == 4;
    if (plain && (format == "I" || format == "<I" || format == "i" || format == "<i")) {
        const auto* words = static_cast<const std::uint32_t*>(view.buf);
        std::uint32_t all = 0;
        if (format.back() == 'i')
            for (std::size_t i = 0; i < n; ++i) all |= words[i];
        if (all <= INT32_MAX || format.back() == 'I')
            return nb::cast(Result<std::uint32_t>(const_cast<std::uint32_t*>(words), {n}, tokens));
    }
    std::unique_ptr<std::uint32_t[]> out(new std::uint32_t[n + 1]);
    if (!lmkv::tokens_from_buffer(format.c_str(), static_cast<const char*>(view.buf),
                                  view.strides[0], n, out.get()))
        bad_value("tokens must be integers, not of format '" + format + "'");
    return nb::cast(owned(std::move(out), n));
}

nb::bytes blake3(nb::handle data, const std::optional<nb::bytes>& key) {
    const Bytes bytes(data);
    const std::uint8_t* const secret = key ? digest(*key, "key") : nullptr;
    std::uint8_t out[lmkv::kDigestBytes];
    {
        const Unlocked unlocked(bytes.size() > kReleaseBytes);
        lmkv::blake3(bytes.data(), bytes.size(), secret, out);
    }
    return nb::bytes(out, sizeof out);
}

struct Leaves {
    std::size_t count;
    std::unique_ptr<std::uint8_t[]> digests;
};

Leaves hash_leaves(const Vector<std::uint32_t>& tokens, std::int64_t chunk_tokens) {
    if (chunk_tokens <= 0) bad_value("chunk_tokens must be positive");
    const auto chunk = static_cast<std::size_t>(chunk_tokens);
    const std::size_t count = tokens.shape(0) / chunk;
    Leaves leaves{
        count, std::unique_ptr<std::uint8_t[]>(new std::uint8_t[count * lmkv::kDigestBytes + 1])};
    const Unlocked unlocked(tokens.shape(0) * 4 > kReleaseBytes);
    lmkv::blake3_many(reinterpret_cast<const std::uint8_t*>(tokens.data()), chunk * 4, count,
                      leaves.digests.get());
    return leaves;
}

nb::list leaf_digests(const Vector<std::uint32_t>& tokens, std::int64_t chunk_tokens) {
    const Leaves leaves = hash_leaves(tokens, chunk_tokens);
    return digest_list(leaves.digests.get(), leaves.count);
}

nb::list chain_digests(const Vector<std::uint32_t>& tokens, std::int64_t chunk_tokens,
                       const nb::bytes& key, const nb::bytes& prev,
                       const std::optional<nb::list>& extras) {
    const std::uint8_t* const secret = digest(key, "key");
    const std::uint8_t* link = digest(prev, "prev");
    const Leaves leaves = hash_leaves(tokens, chunk_tokens);
    if (extras && extras->size() != leaves.count)
        bad_value("extras must have one item for each of the " + std::to_string(leaves.count) +
                  " chunks");
    for (std::size_t i = 0; i < leaves.count; ++i) {
        std::uint8_t* const leaf = leaves.digests.get() + i * lmkv::kDigestBytes;
        const nb::object extra = extras ? nb::object((*extras)[i]) : nb::none();
        const std::uint8_t* data = nullptr;
        std::size_t size = 0;
        if (!extra.is_none()) {
            if (!nb::isinstance<nb::bytes>(extra)) bad_value("extras must be bytes or None");
            const auto bytes = nb::borrow<nb::bytes>(extra);
            data = reinterpret_cast<const std::uint8_t*>(bytes.c_str());
            size = bytes.size();
            if (size > lmkv::kDigestBytes) bad_value("an extra has more than 32 bytes");
        }
        lmkv::blake3_link(secret, link, leaf, data, size, leaf);
        link = leaf;
    }
    return digest_list(leaves.digests.get(), leaves.count);
}

std::uint64_t xxh3_64(nb::handle data) {
    const Bytes bytes(data);
    const Unlocked unlocked(bytes.size() > kReleaseBytes);
    return lmkv::xxh3_64(bytes.data(), bytes.size());
}

nb::object checksums(std::int64_t address, const Vector<std::int64_t>& offsets,
                     const Vector<std::int64_t>& lengths) {
    const std::size_t n = offsets.shape(0);
    if (lengths.shape(0) != n) bad_value("offsets and lengths must be equally long");
    std::int64_t total = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::int64_t offset = offsets.data()[i], length = lengths.data()[i];
        if (offset < 0 || length < 0 || offset > INT64_MAX - length)
            bad_value("a range is negative or too long");
        pointer(address, offset + length);
        if (__builtin_add_overflow(total, length, &total)) bad_value("the ranges are too long");
    }
    std::unique_ptr<std::uint64_t[]> sums(new std::uint64_t[n + 1]);
    {
        const Unlocked unlocked(total > static_cast<std::int64_t>(kReleaseBytes));
        for (std::size_t i = 0; i < n; ++i)
            sums[i] =
                lmkv::xxh3_64(reinterpret_cast<const std::uint8_t*>(address + offsets.data()[i]),
                              static_cast<std::size_t>(lengths.data()[i]));
    }
    return nb::cast(owned(std::move(sums), n));
}

// ---- files ----

lmkv::IoSettings io_settings(bool direct, std::int64_t extent, int threads) {
    if (extent <= 0 || extent % static_cast<std::int64_t>(lmkv::kDiskAlign))
        bad_value("extent must be a positive multiple of 4096");
    if (threads < 1) bad_value("threads must be at least 1");
    return {direct, static_cast<std::size_t>(extent), threads};
}

std::int64_t read_file(nb::str path, std::int64_t address, std::int64_t capacity, bool direct,
                       std::int64_t extent, int threads) {
    const Path name(path);
    char* const into = pointer(address, capacity);
    const lmkv::IoSettings settings = io_settings(direct, extent, threads);
    const Unlocked unlocked;
    return lmkv::read_file(name.c_str(), into, static_cast<std::size_t>(capacity), settings);
}

int write_file(nb::str tmp, nb::str path, std::int64_t address, std::int64_t nbytes, bool direct,
               bool fsync, std::int64_t extent, int threads) {
    const Path tmp_name(tmp), name(path);
    const char* const from = pointer(address, nbytes);
    const lmkv::IoSettings settings = io_settings(direct, extent, threads);
    const Unlocked unlocked;
    return lmkv::write_file(tmp_name.c_str(), name.c_str(), from, static_cast<std::size_t>(nbytes),
                            fsync, settings);
}

nb::list list_dir(nb::str path) {
    const Path name(path);
    std::vector<lmkv::DirEntry> entries;
    int error;
    {
        const Unlocked unlocked;
        error = lmkv::list_dir(name.c_str(), entries);
    }
    if (error) {
        errno = -error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
        throw nb::python_error();
    }
    nb::list out;
    for (const lmkv::DirEntry& e : entries) {
        PyObject* text =
            PyUnicode_DecodeFSDefaultAndSize(e.name.data(), static_cast<Py_ssize_t>(e.name.size()));
        if (!text) throw nb::python_error();
        out.append(nb::make_tuple(nb::steal(text), e.size, e.mtime_ns));
    }
    return out;
}

// ---- the machine ----

nb::dict cpu_features() {
    nb::dict out;
    out["simd"] = lmkv::simd_name(lmkv::simd());
    out["cpus"] = lmkv::usable_cpus();
    out["copy_streams"] = lmkv::stream_count();
#if defined(__x86_64__)
    out["arch"] = "x86_64";
    out["avx2"] = static_cast<bool>(__builtin_cpu_supports("avx2"));
    out["avx512f"] = static_cast<bool>(__builtin_cpu_supports("avx512f"));
#else
    out["arch"] = "other";
#endif
    return out;
}

const char* limit_simd(const char* name) {
    for (const lmkv::Simd level : {lmkv::Simd::portable, lmkv::Simd::avx2, lmkv::Simd::avx512})
        if (std::strcmp(name, lmkv::simd_name(level)) == 0) {
            lmkv::limit_simd(level);
            return lmkv::simd_name(lmkv::simd());
        }
    bad_value("the level must be portable, avx2 or avx512");
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() =
        "Page copies, hashes, checksums and aligned file I/O; see _native.pyi for the contract.";

    nb::class_<lmkv::Slab>(m, "Slab")
        .def(
            "__init__",
            [](lmkv::Slab* self, std::int64_t nbytes, bool huge) {
                if (nbytes <= 0) bad_value("nbytes must be positive");
                new (self) lmkv::Slab(static_cast<std::size_t>(nbytes), huge);
            },
            "nbytes"_a, "huge"_a = true)
        .def_prop_ro("address",
                     [](const lmkv::Slab& s) { return reinterpret_cast<std::intptr_t>(s.base()); })
        .def_prop_ro("nbytes", &lmkv::Slab::nbytes)
        .def("touch", touch, "start"_a, "stop"_a)
        .def("close", [](lmkv::Slab& s) {
            const Unlocked unlocked;
            s.close();
        });
    m.def("memory", memory, "address"_a, "nbytes"_a);
    m.def("zero", zero, "address"_a, "nbytes"_a);

    nb::class_<lmkv::CopyPlan>(m, "CopyPlan")
        .def("__init__", make_plan, "planes"_a, "payload_bytes"_a)
        .def_prop_ro("planes", &lmkv::CopyPlan::planes)
        .def_prop_ro("bytes_per_page", &lmkv::CopyPlan::bytes_per_page);
    m.def("copy_pages", copy_pages, "plan"_a, "gather"_a, "slots"_a, "page_ids"_a, "starts"_a,
          "first"_a, "threads"_a = 1, "stream_bytes"_a = 4 << 20);

    m.def("tokens_u32", tokens_u32, "tokens"_a);
    m.def("blake3", blake3, "data"_a, "key"_a = nb::none());
    m.def("leaf_digests", leaf_digests, nb::arg("tokens").noconvert(), "chunk_tokens"_a);
    m.def("chain_digests", chain_digests, nb::arg("tokens").noconvert(), "chunk_tokens"_a, "key"_a,
          "prev"_a, "extras"_a = nb::none());
    m.def("xxh3_64", xxh3_64, "data"_a);
    m.def("checksums", checksums, "address"_a, "offsets"_a, "lengths"_a);

    m.def("read_file", read_file, "path"_a, "address"_a, "capacity"_a, "direct"_a,
          "extent"_a = 4 << 20, "threads"_a = 4);
    m.def("write_file", write_file, "tmp"_a, "path"_a, "address"_a, "nbytes"_a, "direct"_a,
          "fsync"_a, "extent"_a = 4 << 20, "threads"_a = 4);
    m.def("list_dir", list_dir, "path"_a);

    m.def("cpu_features", cpu_features);
    m.def("limit_simd", limit_simd, "level"_a);
}
