// The codecs of lmkv._native: argument checks, buffers and the GIL.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

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

// Rows of q, checked to be there, rising, and shifted by no more than 8.
CoefficientRows coefficient_rows(const Vector<std::uint32_t>& rows, const Vector<std::uint8_t>& shifts, std::size_t all,
                                 std::size_t cols) {
    if (shifts.shape(0) != rows.shape(0)) bad_value("the arrays must fit together");
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        if (rows.data()[i] >= all || (i && rows.data()[i] <= rows.data()[i - 1])) bad_value("rows must rise");
        if (shifts.data()[i] > 8) bad_value("shifts are at most 8");
    }
    return {rows.data(), shifts.data(), rows.shape(0), cols};
}

std::size_t low_bytes(const CoefficientRows& rows) {
    std::size_t bits = 0;
    for (std::size_t i = 0; i < rows.count; ++i) bits += rows.shifts[i];
    return bits * ((rows.cols + 7) / 8);
}

void decode_coefficients(nb::handle src, const Vector<std::uint16_t>& tables, const Vector<std::uint8_t>& shifts,
                         const Matrix<const std::uint16_t>& freqs, int bits,
                         const std::optional<Vector<std::uint8_t>>& defaults, const Matrix<std::int16_t>& q) {
    const std::size_t count = tables.shape(0);
    const auto model = model_of(freqs, bits);
    if (shifts.shape(0) != count || count > 256 || model->alphabet != 16) bad_value("the arrays must fit together");
    if (defaults && defaults->shape(0) != q.shape(0)) bad_value("there must be a default for each row");
    for (std::size_t i = 0; i < count; ++i)
        if (tables.data()[i] >= model->tables || shifts.data()[i] > 8) bad_value("an id without a table or shift");
    const Bytes bytes(src);
    const Unlocked unlocked;
    coefficients_decode(bytes.data(), bytes.size(), {tables.data(), shifts.data(), count, model.get()},
                        defaults ? defaults->data() : nullptr, q.data(), q.shape(0), q.shape(1));
}

std::size_t split_coefficients(const Matrix<const std::int16_t>& q, const Vector<std::uint32_t>& rows,
                               const Vector<std::uint8_t>& shifts, const Vector<std::uint16_t>& tables,
                               const Matrix<const std::uint16_t>& freqs, const Matrix<std::uint8_t>& symbols,
                               nb::handle low, nb::handle escapes) {
    const Bytes bits(low, PyBUF_WRITABLE), values(escapes, PyBUF_WRITABLE);
    const CoefficientRows which = coefficient_rows(rows, shifts, q.shape(0), q.shape(1));
    if (symbols.shape(0) != which.count || symbols.shape(1) != which.cols || tables.shape(0) != which.count ||
        freqs.shape(1) != 16)
        bad_value("the arrays must fit together");
    for (std::size_t i = 0; i < which.count; ++i)
        if (tables.data()[i] >= freqs.shape(0)) bad_value("a row's table number is too high");
    if (bits.size() != low_bytes(which) || values.size() < 2 * which.count * which.cols ||
        reinterpret_cast<std::uintptr_t>(values.data()) % 2)
        bad_value("the low bits have another size, or the escapes no room");
    const Unlocked unlocked;
    return coefficients_split(q.data(), which, tables.data(), freqs.data(), symbols.data(), bits.mutable_data(),
                              reinterpret_cast<std::int16_t*>(values.mutable_data()));
}

void count_coefficients(const Matrix<const std::int16_t>& q, const Vector<std::uint32_t>& rows, int shift,
                        const Matrix<std::uint32_t>& counts) {
    if (shift < 0 || shift > 8 || counts.shape(0) != rows.shape(0) || counts.shape(1) != 16)
        bad_value("the arrays must fit together");
    for (std::size_t i = 0; i < rows.shape(0); ++i)
        if (rows.data()[i] >= q.shape(0)) bad_value("there is no such row");
    const Unlocked unlocked;
    coefficients_counts(q.data(), rows.data(), rows.shape(0), q.shape(1), shift, counts.data());
}

void square_coefficients(const Matrix<const std::int16_t>& q,
                         const nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& squares) {
    if (squares.shape(0) != q.shape(0)) bad_value("the arrays must fit together");
    const Unlocked unlocked;
    coefficients_squares(q.data(), q.shape(0), q.shape(1), squares.data());
}

void check_block(const KltMatrix& matrix, const Matrix<const std::int16_t>& q, const Vector<float>& scale,
                 const Vector<float>& mean) {
    if (q.shape(0) != matrix.kept || scale.shape(0) != matrix.channels || mean.shape(0) != matrix.channels)
        bad_value("the arrays must fit together");
}

void transform_klt(const KltMatrix& matrix, const Matrix<const std::int16_t>& q, const Vector<float>& scale,
                   const Vector<float>& mean, const Matrix<float>& out) {
    check_block(matrix, q, scale, mean);
    const std::size_t tokens = q.shape(1);
    if (out.shape(0) != tokens || out.shape(1) != matrix.channels) bad_value("the arrays must fit together");
    const Unlocked unlocked;
    for (std::size_t t = 0; t < tokens; t += matrix.tile())
        matrix.transform(q.data() + t, std::min(matrix.tile(), tokens - t), tokens, scale.data(), mean.data(),
                         out.data() + t * matrix.channels);
}

void turns_klt(const nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>& inv_freq,
               std::uint64_t first, double factor, const Matrix<float>& cos, const Matrix<float>& sin) {
    const std::size_t tokens = cos.shape(0), count = inv_freq.shape(0);
    if (cos.shape(1) != count || sin.shape(0) != tokens || sin.shape(1) != count)
        bad_value("cos and sin must be [tokens, pairs]");
    const Unlocked unlocked;
    klt_cos_sin(inv_freq.data(), count, first, tokens, factor, cos.data(), sin.data());
}

// Sizes: layers, pages, tokens of a page, heads, channels of a head. Places: the first word, then the steps from layer
// to layer, page to page, token to token, head to head, channel to channel, in words.
using Sizes = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t>;
using Places = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

KltPlaces klt_places(const Sizes& sizes, const Places& places, const Bytes& words) {
    const auto [layers, pages, page_tokens, heads, dim] = sizes;
    const auto [start, layer, page, token, head, channel] = places;
    const auto most = static_cast<std::int64_t>(words.size() / 2);
    const std::pair<std::size_t, std::int64_t> steps[] = {
        {layers, layer}, {pages, page}, {page_tokens, token}, {heads, head}, {dim, channel}};
    std::int64_t last = start;
    std::size_t values = 1;
    for (const auto& [count, step] : steps) {
        if (!count || count > words.size() || values > words.size() / count) bad_value("sizes are out of range");
        values *= count;
        if (start < 0 || step < 0 || step > most || last > most) bad_value("a word lies outside of the buffer");
        last += static_cast<std::int64_t>(count - 1) * step;
    }
    if (last >= most || reinterpret_cast<std::uintptr_t>(words.data()) % 2)
        bad_value("a word lies outside of the buffer, or is not aligned");
    return {layers, pages, page_tokens, heads, dim, start, layer, page, token, head, channel};
}

using Turns = std::optional<Matrix<const float>>;

KltRope klt_rope(const Turns& cos, const Turns& sin, bool interleaved, const KltPlaces& places) {
    if (cos.has_value() != sin.has_value()) bad_value("cos and sin go together");
    if (!cos) return {nullptr, nullptr, 0, false};
    const std::size_t tokens = places.pages * places.page_tokens, pairs = cos->shape(1);
    if (cos->shape(0) != tokens || sin->shape(0) != tokens || sin->shape(1) != pairs || 2 * pairs > places.dim)
        bad_value("cos and sin must be [tokens, pairs]");
    return {cos->data(), sin->data(), pairs, interleaved};
}

// Channels [layers, heads * dim, tokens]: the layers may lie apart.
template <typename T>
using Layers = nb::ndarray<T, nb::ndim<3>, nb::device::cpu>;

template <typename T>
std::size_t layer_step(const Layers<T>& x, const KltPlaces& places) {
    const std::size_t tokens = places.pages * places.page_tokens;
    if (x.shape(0) != places.layers || x.shape(1) != places.heads * places.dim || x.shape(2) != tokens ||
        (tokens > 1 && x.stride(2) != 1) || (x.shape(1) > 1 && x.stride(1) != static_cast<std::int64_t>(tokens)) ||
        x.stride(0) < 0)
        bad_value("x must be [layers, heads * dim, pages * page_tokens]");
    return static_cast<std::size_t>(x.stride(0));
}

void write_klt_bf16(const Layers<const float>& x, const Turns& cos, const Turns& sin, bool interleaved,
                    const Sizes& sizes, const Places& places, nb::handle words) {
    const Bytes into(words, PyBUF_WRITABLE);
    const KltPlaces where = klt_places(sizes, places, into);
    const KltRope rope = klt_rope(cos, sin, interleaved, where);
    const std::size_t step = layer_step(x, where);
    const Unlocked unlocked;
    klt_write_bf16(x.data(), step, rope, where, reinterpret_cast<std::uint16_t*>(into.mutable_data()));
}

unsigned read_klt_bf16(nb::handle words, const Turns& cos, const Turns& sin, bool interleaved, const Sizes& sizes,
                       const Places& places, const Layers<float>& x) {
    const Bytes from(words);
    const KltPlaces where = klt_places(sizes, places, from);
    const KltRope rope = klt_rope(cos, sin, interleaved, where);
    const std::size_t step = layer_step(x, where);
    const Unlocked unlocked;
    return klt_read_bf16(reinterpret_cast<const std::uint16_t*>(from.data()), rope, where, x.data(), step);
}

void write_klt_block(const KltMatrix& matrix, const Matrix<const std::int16_t>& q, const Vector<float>& scale,
                     const Vector<float>& mean, const Turns& cos, const Turns& sin, bool interleaved,
                     const std::vector<std::pair<Sizes, Places>>& places, nb::handle words) {
    check_block(matrix, q, scale, mean);
    const Bytes into(words, PyBUF_WRITABLE);
    if (places.empty() || places.size() > 2) bad_value("there are one or two places");
    KltPlaces where[2];
    std::size_t channels = 0;
    for (std::size_t i = 0; i < places.size(); ++i) {
        where[i] = klt_places(places[i].first, places[i].second, into);
        channels += where[i].layers * where[i].heads * where[i].dim;
        if (where[i].layers != where[0].layers || where[i].pages * where[i].page_tokens != q.shape(1) ||
            where[i].page_tokens != where[0].page_tokens)
            bad_value("the places must be of the same layers and tokens");
    }
    if (channels != matrix.channels) bad_value("the places have other channels");
    const KltRope rope = klt_rope(cos, sin, interleaved, where[0]);
    const Unlocked unlocked;
    klt_write_block(matrix, q.data(), scale.data(), mean.data(), rope, where, places.size(),
                    reinterpret_cast<std::uint16_t*>(into.mutable_data()));
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
    m.def("coefficients_decode", decode_coefficients, "src"_a, nb::arg("tables").noconvert(),
          nb::arg("shifts").noconvert(), nb::arg("freqs").noconvert(), "bits"_a, nb::arg("defaults").noconvert().none(),
          nb::arg("q").noconvert());
    m.def("coefficients_split", split_coefficients, nb::arg("q").noconvert(), nb::arg("rows").noconvert(),
          nb::arg("shifts").noconvert(), nb::arg("tables").noconvert(), nb::arg("freqs").noconvert(),
          nb::arg("symbols").noconvert(), "low"_a, "escapes"_a);
    m.def("coefficients_counts", count_coefficients, nb::arg("q").noconvert(), nb::arg("rows").noconvert(), "shift"_a,
          nb::arg("counts").noconvert());
    m.def("coefficients_squares", square_coefficients, nb::arg("q").noconvert(), nb::arg("squares").noconvert());
    nb::class_<KltMatrix>(m, "KltMatrix", nb::is_final())
        .def(
            "__init__",
            [](KltMatrix* self, const Matrix<const std::int16_t>& matrix) {
                if (!matrix.shape(0) || !matrix.shape(1)) bad_value("the matrix must not be empty");
                new (self) KltMatrix(matrix.data(), matrix.shape(0), matrix.shape(1));
            },
            nb::arg("matrix").noconvert());
    m.def("klt_transform", transform_klt, "matrix"_a, nb::arg("q").noconvert(), nb::arg("scale").noconvert(),
          nb::arg("mean").noconvert(), nb::arg("out").noconvert());
    m.def("klt_cos_sin", turns_klt, nb::arg("inv_freq").noconvert(), "first"_a, "factor"_a, nb::arg("cos").noconvert(),
          nb::arg("sin").noconvert());
    m.def("klt_write_bf16", write_klt_bf16, nb::arg("x").noconvert(), nb::arg("cos").noconvert().none(),
          nb::arg("sin").noconvert().none(), "interleaved"_a, "sizes"_a, "places"_a, "words"_a);
    m.def("klt_read_bf16", read_klt_bf16, "words"_a, nb::arg("cos").noconvert().none(),
          nb::arg("sin").noconvert().none(), "interleaved"_a, "sizes"_a, "places"_a, nb::arg("x").noconvert());
    m.def("klt_write_block", write_klt_block, "matrix"_a, nb::arg("q").noconvert(), nb::arg("scale").noconvert(),
          nb::arg("mean").noconvert(), nb::arg("cos").noconvert().none(), nb::arg("sin").noconvert().none(),
          "interleaved"_a, "places"_a, "words"_a);
}

}  // namespace lmkv
