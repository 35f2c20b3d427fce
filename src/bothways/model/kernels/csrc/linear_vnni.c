/* Linear layers in int8 by AVX512-VNNI: unsigned codes of rows times signed codes of weights. */

#include "linear_simd.h"

enum { FORMAT = INT8 };
#define KERNELS int8_microkernels

/* Four products for each output, added up in int32, which is exact. */
INLINE __m512 multiply_add(__m512 sum, __m512i x, __m512i weights) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), x, weights));
}

#include "linear_microkernel.h"
