// lmkv._native: argument checks, buffers and the GIL; the work is done in the files it includes.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "blake3.h"
#include "copy.h"
#include "cpu.h"
#include "disk.h"
#include "key.h"
#include "memory.h"
#include "stream.h"
#include "tokens.h"
#include "xxh3.h"

using namespace nb::literals;
using std::int64_t;

namespace {

using lmkv::bad_value;
using lmkv::Bytes;
using lmkv::kReleaseBytes;
using lmkv::Unlocked;
using lmkv::Vector;

template <typename T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

nb::object checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

// A str or path object in the file system's own bytes.
nb::bytes path_bytes(nb::handle path) {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &bytes)) throw nb::python_error();
    return nb::steal<nb::bytes>(bytes);
}

[[noreturn]] void os_error(int error, nb::handle path) {
    errno = -error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    throw nb::python_error();
}

char* pointer(int64_t address, int64_t nbytes) {
    if (address <= 0) bad_value("address must be positive");
    if (nbytes < 0 || nbytes > INT64_MAX - address) bad_value("the range leaves the address space");
    return reinterpret_cast<char*>(address);
}

const std::uint8_t* digest(const nb::bytes& value, const char* name) {
    if (value.size() != lmkv::kDigestBytes) bad_value(std::string(name) + " must be 32 bytes");
    return static_cast<const std::uint8_t*>(value.data());
}

template <typename T>
nb::object array_of(std::vector<T> values) {
    auto held = std::make_unique<std::vector<T>>(std::move(values));
    const nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    std::vector<T>& v = *held.release();
    return nb::cast(Result<T>(v.data(), {v.size()}, owner));
}

void touch(lmkv::Slab& slab, int64_t start, int64_t stop) {
    if (start < 0 || start > stop || static_cast<std::size_t>(stop) > slab.nbytes())
        bad_value("touch() needs 0 <= start <= stop <= nbytes");
    int error;
    {
        const Unlocked unlocked;
        error = slab.touch(static_cast<std::size_t>(start), static_cast<std::size_t>(stop));
    }
    if (error == -EBADF) bad_value("the slab is closed");
    if (error == -ENOMEM) throw std::bad_alloc();
    if (error) os_error(error, nb::none());
}

nb::object memory(int64_t address, int64_t nbytes) {
    return checked(PyMemoryView_FromMemory(pointer(address, nbytes), nbytes, PyBUF_WRITE));
}

void zero(int64_t address, int64_t nbytes) {
    char* const at = pointer(address, nbytes);
    const auto n = static_cast<std::size_t>(nbytes);
    const Unlocked unlocked(n > kReleaseBytes);
    std::memset(at, 0, n);
}

using Planes = nb::ndarray<const int64_t, nb::shape<-1, lmkv::kPlaneFields>, nb::c_contig, nb::device::cpu>;

void make_plan(lmkv::CopyPlan* self, const Planes& planes, int64_t payload_bytes) {
    const auto* rows = reinterpret_cast<const lmkv::Plane*>(planes.data());
    new (self) lmkv::CopyPlan(rows, planes.shape(0), payload_bytes);
}

void copy_pages(const lmkv::CopyPlan& plan, bool gather, const Vector<int64_t>& slots, const Vector<int64_t>& page_ids,
                const Vector<int64_t>& starts, const Vector<int64_t>& first, int threads, int64_t stream_bytes) {
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

nb::object tokens_u32(nb::handle tokens, int64_t start, int64_t stop) {
    PyObject* const object = tokens.ptr();
    if (start < 0) bad_value("start must not be negative");
    const auto skip = static_cast<std::size_t>(start);
    const auto range = [&](std::size_t n) {  // how many of n there are in [start, stop)
        return n > skip && stop > start ? std::min(n, static_cast<std::size_t>(stop)) - skip : 0;
    };
    if (PyList_Check(object) || PyTuple_Check(object)) {
        std::vector<std::uint32_t> out(range(nb::len(tokens)));
        lmkv::tokens_from_items(object, skip, out.size(), out.data());
        return array_of(std::move(out));
    }
    if (PyBytes_Check(object) || PyByteArray_Check(object) || !PyObject_CheckBuffer(object))
        bad_value("tokens must be a list, a tuple or an array of integers");
    const Bytes buffer(tokens, PyBUF_STRIDED_RO | PyBUF_FORMAT);
    const Py_buffer& view = buffer.view();
    if (view.ndim != 1) bad_value("tokens must have one dimension");
    // Byte order '>' and '!' and anything but one integer code are refused.
    const char* const format = view.format ? view.format : "B";
    const char* const code = format + std::strspn(format, "@=<");
    const bool is_signed = *code && std::strchr("bhilqn", *code);
    if (!*code || code[1] || !(is_signed || std::strchr("BHILQN", *code)))
        bad_value(std::string("tokens must be integers, not of format ") + format);
    const std::size_t n = range(static_cast<std::size_t>(view.shape[0]));
    const char* const first = static_cast<const char*>(view.buf) + (n ? start * view.strides[0] : 0);
    if (view.itemsize == 4 && view.strides[0] == 4) {
        auto* const words = reinterpret_cast<std::uint32_t*>(const_cast<char*>(first));
        std::uint32_t signs = 0;
        for (std::size_t i = 0; is_signed && i < n; ++i) signs |= words[i];
        if (signs <= INT32_MAX) return nb::cast(Result<std::uint32_t>(words, {n}, tokens));
    }
    std::vector<std::uint32_t> out(n);
    lmkv::tokens_from_array(first, is_signed, static_cast<std::size_t>(view.itemsize), view.strides[0], n, out.data());
    return array_of(std::move(out));
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

// The leaf digests of all full chunks, one after another.
std::vector<std::uint8_t> hash_leaves(const Vector<std::uint32_t>& tokens, int64_t chunk_tokens) {
    if (chunk_tokens <= 0) bad_value("chunk_tokens must be positive");
    const std::size_t chunk = static_cast<std::size_t>(chunk_tokens), count = tokens.shape(0) / chunk;
    std::vector<std::uint8_t> leaves(count * lmkv::kDigestBytes);
    const Unlocked unlocked(tokens.nbytes() > kReleaseBytes);
    lmkv::blake3_many(reinterpret_cast<const std::uint8_t*>(tokens.data()), chunk * 4, count, leaves.data());
    return leaves;
}

nb::list digest_list(const std::vector<std::uint8_t>& digests) {
    nb::list out;
    for (std::size_t at = 0; at < digests.size(); at += lmkv::kDigestBytes)
        out.append(nb::bytes(digests.data() + at, lmkv::kDigestBytes));
    return out;
}

nb::list leaf_digests(const Vector<std::uint32_t>& tokens, int64_t chunk_tokens) {
    return digest_list(hash_leaves(tokens, chunk_tokens));
}

nb::list chain_digests(const Vector<std::uint32_t>& tokens, int64_t chunk_tokens, const nb::bytes& key,
                       const nb::bytes& prev, const std::optional<nb::list>& extras) {
    const std::uint8_t* const secret = digest(key, "key");
    const std::uint8_t* link = digest(prev, "prev");
    std::vector<std::uint8_t> links = hash_leaves(tokens, chunk_tokens);
    const std::size_t count = links.size() / lmkv::kDigestBytes;
    if (extras && extras->size() != count) bad_value("extras must have one item for each full chunk");
    for (std::size_t i = 0; i < count; ++i) {
        nb::object extra = extras ? nb::object((*extras)[i]) : nb::none();
        const std::optional<Bytes> bytes = extra.is_none() ? std::nullopt : std::make_optional<Bytes>(extra);
        const std::size_t size = bytes ? bytes->size() : 0;
        if (size > lmkv::kDigestBytes) bad_value("an extra has more than 32 bytes");
        std::uint8_t* const leaf = links.data() + i * lmkv::kDigestBytes;
        lmkv::blake3_link(secret, link, leaf, bytes ? bytes->data() : nullptr, size, leaf);
        link = leaf;
    }
    return digest_list(links);
}

// The fields of a key's text, or None.
nb::object parse_key(const nb::str& text) {
    Py_ssize_t length = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (!utf8) PyErr_Clear();  // a lone surrogate
    lmkv::Key key;
    if (!utf8 || !lmkv::parse_key({utf8, static_cast<std::size_t>(length)}, key)) return nb::none();
    const auto bytes = [](const auto& field) { return nb::bytes(field, sizeof field); };
    return nb::make_tuple(bytes(key.scope), bytes(key.tenant), bytes(key.digest), bytes(key.parent), key.depth,
                          key.group, key.shard);
}

std::uint64_t xxh3_64(nb::handle data) {
    const Bytes bytes(data);
    const Unlocked unlocked(bytes.size() > kReleaseBytes);
    return lmkv::xxh3_64(bytes.data(), bytes.size());
}

nb::object checksums(int64_t address, const Vector<int64_t>& offsets, const Vector<int64_t>& lengths) {
    const std::size_t n = offsets.shape(0);
    if (lengths.shape(0) != n) bad_value("offsets and lengths must be equally long");
    std::vector<std::uint64_t> sums(n);
    for (std::size_t i = 0; i < n; ++i) {
        const int64_t offset = offsets.data()[i], length = lengths.data()[i];
        if (offset < 0 || length < 0 || offset > INT64_MAX - length) bad_value("a range is negative or too long");
        pointer(address, offset + length);
    }
    {
        const Unlocked unlocked;
        for (std::size_t i = 0; i < n; ++i)
            sums[i] = lmkv::xxh3_64(reinterpret_cast<const std::uint8_t*>(address + offsets.data()[i]),
                                    static_cast<std::size_t>(lengths.data()[i]));
    }
    return array_of(std::move(sums));
}

lmkv::IoSettings io_settings(bool direct, int64_t extent, int threads) {
    if (extent <= 0 || extent % static_cast<int64_t>(lmkv::kDiskAlign))
        bad_value("extent must be a positive multiple of 4096");
    if (threads < 1) bad_value("threads must be at least 1");
    return {direct, static_cast<std::size_t>(extent), threads};
}

int64_t read_file(nb::handle path, int64_t address, int64_t capacity, bool direct, int64_t extent, int threads) {
    const nb::bytes name = path_bytes(path);
    char* const into = pointer(address, capacity);
    const lmkv::IoSettings settings = io_settings(direct, extent, threads);
    const Unlocked unlocked;
    return lmkv::read_file(name.c_str(), into, static_cast<std::size_t>(capacity), settings);
}

int write_file(nb::handle tmp, nb::handle path, int64_t address, int64_t nbytes, bool direct, bool fsync,
               int64_t extent, int threads) {
    const nb::bytes tmp_name = path_bytes(tmp), name = path_bytes(path);
    const char* const from = pointer(address, nbytes);
    const lmkv::IoSettings settings = io_settings(direct, extent, threads);
    const Unlocked unlocked;
    return lmkv::write_file(tmp_name.c_str(), name.c_str(), from, static_cast<std::size_t>(nbytes), fsync, settings);
}

nb::list list_dir(nb::handle path) {
    const nb::bytes name = path_bytes(path);
    std::vector<lmkv::DirEntry> entries;
    int error;
    {
        const Unlocked unlocked;
        error = lmkv::list_dir(name.c_str(), entries);
    }
    if (error) os_error(error, path);
    nb::list out;
    for (const auto& [file, size, mtime_ns] : entries) {
        const auto length = static_cast<Py_ssize_t>(file.size());
        out.append(nb::make_tuple(checked(PyUnicode_DecodeFSDefaultAndSize(file.data(), length)), size, mtime_ns));
    }
    return out;
}

nb::dict cpu_features() {
    nb::dict out;
    out["simd"] = lmkv::simd_name(lmkv::simd());
    out["cpus"] = lmkv::usable_cpus();
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
    using lmkv::Simd;
    for (const Simd level : {Simd::portable, Simd::avx2, Simd::avx512}) {
        if (std::strcmp(name, lmkv::simd_name(level)) != 0) continue;
        lmkv::limit_simd(level);
        return lmkv::simd_name(lmkv::simd());
    }
    bad_value("the level must be portable, avx2 or avx512");
}

void make_slab(lmkv::Slab* self, int64_t nbytes, bool huge, int fd) {
    if (nbytes <= 0) bad_value("nbytes must be positive");
    new (self) lmkv::Slab(static_cast<std::size_t>(nbytes), huge, fd);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // an engine left open at exit is no leak worth a page of text
    m.doc() = "Page copies, hashes, checksums and aligned file I/O; see _native.pyi for the contract.";

    nb::class_<lmkv::Slab>(m, "Slab")
        .def("__init__", make_slab, "nbytes"_a, "huge"_a = true, "fd"_a = -1)
        .def_prop_ro("address", [](const lmkv::Slab& s) { return reinterpret_cast<std::intptr_t>(s.base()); })
        .def_prop_ro("nbytes", &lmkv::Slab::nbytes)
        .def("touch", touch, "start"_a, "stop"_a)
        .def("close", &lmkv::Slab::close, nb::call_guard<nb::gil_scoped_release>());
    m.def("memory", memory, "address"_a, "nbytes"_a);
    m.def("zero", zero, "address"_a, "nbytes"_a);

    nb::class_<lmkv::CopyPlan>(m, "CopyPlan")
        .def("__init__", make_plan, "planes"_a, "payload_bytes"_a)
        .def_prop_ro("planes", &lmkv::CopyPlan::planes)
        .def_prop_ro("bytes_per_page", &lmkv::CopyPlan::bytes_per_page);
    m.def("copy_pages", copy_pages, "plan"_a, "gather"_a, "slots"_a, "page_ids"_a, "starts"_a, "first"_a,
          "threads"_a = 1, "stream_bytes"_a = 4 << 20);

    m.def("tokens_u32", tokens_u32, "tokens"_a.none(), "start"_a = 0, "stop"_a = INT64_MAX);
    m.def("blake3", blake3, "data"_a, "key"_a = nb::none());
    m.def("leaf_digests", leaf_digests, nb::arg("tokens").noconvert(), "chunk_tokens"_a);
    m.def("chain_digests", chain_digests, nb::arg("tokens").noconvert(), "chunk_tokens"_a, "key"_a, "prev"_a,
          "extras"_a = nb::none());
    m.def("parse_key", parse_key, "text"_a);
    m.def("xxh3_64", xxh3_64, "data"_a);
    m.def("checksums", checksums, "address"_a, "offsets"_a, "lengths"_a);

    m.def("read_file", read_file, "path"_a, "address"_a, "capacity"_a, "direct"_a, "extent"_a = 4 << 20,
          "threads"_a = 4);
    m.def("write_file", write_file, "tmp"_a, "path"_a, "address"_a, "nbytes"_a, "direct"_a, "fsync"_a,
          "extent"_a = 4 << 20, "threads"_a = 4);
    m.def("list_dir", list_dir, "path"_a);

    m.def("cpu_features", cpu_features);
    m.def("limit_simd", limit_simd, "level"_a);

    lmkv::bind_codecs(m);
}
