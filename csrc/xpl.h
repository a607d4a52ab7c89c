// The exact codec: exponents entropy-coded, sign and mantissa as they are. docs/codecs.md has the stream.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmkv {

// A float of 1 + exponent + mantissa bits in `bytes` bytes.
struct XplFloat {
    int bytes, exponent, mantissa;
};

// Rows of values in a buffer: row i is the runs of `dim` neighbouring values at starts[i] + a * stride0 + b * stride1
// for every a < count0, b < count1. All in values.
struct XplRows {
    const std::int64_t* starts;
    std::size_t rows, count0, count1, dim;
    std::int64_t stride0, stride1;
    std::size_t cols() const { return count0 * count1 * dim; }
};

// std::invalid_argument unless there is a value and all of them lie in [0, values), as do no products of sizes
// overflow.
void xpl_check(const XplRows& rows, std::size_t values);

// The bytes written to out; 0 when it is too small. values: rows.starts and strides count in these.
std::size_t xpl_encode(const std::uint8_t* values, const XplFloat& type, const XplRows& rows, std::uint8_t* out,
                       std::size_t capacity);

// Writes every value of the rows. Returns the bytes of src that it took: others may follow.
// std::invalid_argument: src is truncated or corrupt; what values then holds is unspecified.
std::size_t xpl_decode(const std::uint8_t* src, std::size_t nbytes, const XplFloat& type, const XplRows& rows,
                       std::uint8_t* values);

}  // namespace lmkv
