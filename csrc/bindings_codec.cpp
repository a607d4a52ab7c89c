// The codecs of lmkv._native: argument checks, buffers and the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "klt.h"
#include "rans.h"
#include "xpl.h"

using namespace nb::literals;

namespace lmkv {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<const RansModel> model_of(const Matrix<const std::uint16_t>& freqs, int bits) {
    return RansModel::cached(freqs.data(), freqs.shape(0), freqs.shape(1), bits);
}

void check_rows(std::size_t rows, const Vector<std::uint16_t>& tables) {
    if (tables.shape(0) != rows) bad_value("there must be a table number for each row");
}

std::size_t encode_rans(const Matrix<const std::uint8_t>& symbols, const Vector<std::uint16_t>& tables,
                        const Matrix<const std::uint16_t>& freqs, int bits, nb::handle out, std::size_t streams) {
    const std::size_t rows = symbols.shape(0), cols = symbols.shape(1);
    check_rows(rows, tables);
    const Bytes into(out, PyBUF_WRITABLE);
    const Unlocked unlocked;
    return rans_encode(symbols.data(), rows, cols, tables.data(), *model_of(freqs, bits), into.mutable_data(),
                       into.size(), streams);
}

void decode_rans(nb::handle src, const Vector<std::uint16_t>& tables, const Matrix<const std::uint16_t>& freqs,
                 int bits, const Matrix<std::uint8_t>& symbols) {
    const std::size_t rows = symbols.shape(0), cols = symbols.shape(1);
    check_rows(rows, tables);
    const Bytes bytes(src);
    const Unlocked unlocked;
    rans_decode(bytes.data(), bytes.size(), tables.data(), *model_of(freqs, bits), symbols.data(), rows, cols);
}

// Rows of values in a Python buffer, checked against its size and alignment.
XplRows xpl_rows(const Bytes& values, const XplFloat& type, const Vector<std::int64_t>& starts, std::size_t count0,
                 std::int64_t stride0, std::size_t count1, std::int64_t stride1, std::size_t dim) {
    const auto bytes = static_cast<std::size_t>(type.bytes);
    if (type.bytes < 1 || values.size() % bytes || reinterpret_cast<std::uintptr_t>(values.data()) % bytes)
        bad_value("the buffer must hold whole values, aligned to their size");
    const XplRows rows{starts.data(), starts.shape(0), count0, count1, dim, stride0, stride1};
    xpl_check(rows, values.size() / bytes);
    return rows;
}

std::size_t encode_xpl(nb::handle values, std::tuple<int, int, int> type, const Vector<std::int64_t>& starts,
                       std::size_t count0, std::int64_t stride0, std::size_t count1, std::int64_t stride1,
                       std::size_t dim, nb::handle out) {
    const Bytes from(values), into(out, PyBUF_WRITABLE);
    const XplFloat kind{std::get<0>(type), std::get<1>(type), std::get<2>(type)};
    const XplRows rows = xpl_rows(from, kind, starts, count0, stride0, count1, stride1, dim);
    const Unlocked unlocked;
    return xpl_encode(from.data(), kind, rows, into.mutable_data(), into.size());
}

std::size_t decode_xpl(nb::handle src, std::tuple<int, int, int> type, const Vector<std::int64_t>& starts,
                       std::size_t count0, std::int64_t stride0, std::size_t count1, std::int64_t stride1,
                       std::size_t dim, nb::handle values) {
    const Bytes from(src), into(values, PyBUF_WRITABLE);
    const XplFloat kind{std::get<0>(type), std::get<1>(type), std::get<2>(type)};
    const XplRows rows = xpl_rows(into, kind, starts, count0, stride0, count1, stride1, dim);
    const Unlocked unlocked;
    return xpl_decode(from.data(), from.size(), kind, rows, into.mutable_data());
}

void join_coefficients(const Matrix<const std::uint8_t>& symbols, const Vector<std::uint8_t>& shifts, nb::handle low,
                       nb::handle escapes, const Matrix<std::int16_t>& q) {
    const std::size_t rows = symbols.shape(0), cols = symbols.shape(1);
    const Bytes bits(low), values(escapes);
    std::size_t bit_rows = 0;
    if (shifts.shape(0) != rows || q.shape(0) != rows || q.shape(1) != cols) bad_value("the arrays must fit together");
    for (std::size_t r = 0; r < rows; ++r) {
        if (shifts.data()[r] > 8) bad_value("shifts are at most 8");
        bit_rows += shifts.data()[r];
    }
    if (bits.size() != bit_rows * ((cols + 7) / 8) || values.size() % 2) bad_value("the low bits have another size");
    const Unlocked unlocked;
    if (!coefficients_join(symbols.data(), shifts.data(), rows, cols, bits.data(), values.data(), values.size() / 2,
                           q.data()))
        bad_value("more or fewer escapes than escaped symbols");
}

void transform_klt(const Matrix<const std::int16_t>& matrix, const Matrix<const std::int16_t>& q,
                   const Vector<float>& scale, const Vector<float>& mean, const Matrix<float>& out) {
    const std::size_t channels = matrix.shape(0), kept = matrix.shape(1), tokens = q.shape(1);
    if (q.shape(0) != kept || scale.shape(0) != channels || mean.shape(0) != channels || out.shape(0) != channels ||
        out.shape(1) != tokens)
        bad_value("the arrays must fit together");
    const Unlocked unlocked;
    klt_transform(matrix.data(), q.data(), scale.data(), mean.data(), channels, kept, tokens, out.data());
}

// places: start, then the strides of page, token, head and channel, in words.
void write_klt_bf16(const Matrix<const float>& x, const std::optional<Matrix<const float>>& cos,
                    const std::optional<Matrix<const float>>& sin, bool interleaved, std::size_t pages,
                    std::size_t page_tokens, std::size_t heads,
                    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t> places,
                    nb::handle words) {
    const Bytes into(words, PyBUF_WRITABLE);
    const std::size_t channels = x.shape(0), tokens = x.shape(1);
    if (!pages || !page_tokens || !heads || tokens / pages != page_tokens || tokens % pages || channels % heads ||
        !channels)
        bad_value("x must be [heads * dim, pages * page_tokens]");
    const std::size_t dim = channels / heads, pairs = cos ? cos->shape(0) : 0;
    if (cos.has_value() != sin.has_value() ||
        (cos && (cos->shape(1) != tokens || sin->shape(1) != tokens || sin->shape(0) != pairs || 2 * pairs > dim)))
        bad_value("cos and sin must be [pairs, tokens]");
    const auto [start, page, token, head, channel] = places;
    const auto most = static_cast<std::int64_t>(into.size() / 2);
    std::int64_t last = start;
    const std::pair<std::size_t, std::int64_t> steps[] = {
        {pages, page}, {page_tokens, token}, {heads, head}, {dim, channel}};
    for (const auto& [count, step] : steps) {
        if (start < 0 || step < 0 || step > most || last > most) bad_value("a word lies outside of the buffer");
        last += static_cast<std::int64_t>(count - 1) * step;
    }
    if (last >= most || reinterpret_cast<std::uintptr_t>(into.data()) % 2)
        bad_value("a word lies outside of the buffer, or is not aligned");
    const KltRope rope{cos ? cos->data() : nullptr, sin ? sin->data() : nullptr, pairs, interleaved};
    const KltPlaces where{pages, page_tokens, heads, dim, start, page, token, head, channel};
    const Unlocked unlocked;
    klt_write_bf16(x.data(), rope, where, reinterpret_cast<std::uint16_t*>(into.mutable_data()));
}

}  // namespace

void bind_codecs(nb::module_& m) {
    m.def("rans_encode", encode_rans, nb::arg("symbols").noconvert(), nb::arg("tables").noconvert(),
          nb::arg("freqs").noconvert(), "bits"_a, "out"_a, "streams"_a = 0);
    m.def("rans_decode", decode_rans, "src"_a, nb::arg("tables").noconvert(), nb::arg("freqs").noconvert(), "bits"_a,
          nb::arg("symbols").noconvert());
    m.def("xpl_encode", encode_xpl, "values"_a, "type"_a, nb::arg("starts").noconvert(), "count0"_a, "stride0"_a,
          "count1"_a, "stride1"_a, "dim"_a, "out"_a);
    m.def("xpl_decode", decode_xpl, "src"_a, "type"_a, nb::arg("starts").noconvert(), "count0"_a, "stride0"_a,
          "count1"_a, "stride1"_a, "dim"_a, "values"_a);
    m.def("coefficients_join", join_coefficients, nb::arg("symbols").noconvert(), nb::arg("shifts").noconvert(),
          "low"_a, "escapes"_a, nb::arg("q").noconvert());
    m.def("klt_transform", transform_klt, nb::arg("matrix").noconvert(), nb::arg("q").noconvert(),
          nb::arg("scale").noconvert(), nb::arg("mean").noconvert(), nb::arg("out").noconvert());
    m.def("klt_write_bf16", write_klt_bf16, nb::arg("x").noconvert(), nb::arg("cos").noconvert().none(),
          nb::arg("sin").noconvert().none(), "interleaved"_a, "pages"_a, "page_tokens"_a, "heads"_a, "places"_a,
          "words"_a);
}

}  // namespace lmkv
