/* Batched copy between two regions; called without the interpreter's lock. */

#include <stdint.h>
#include <string.h>

/* Bytes copied between two looks at the cancel flag: well under a millisecond. */
#define STEP ((int64_t)1 << 21)

/* Copies n pieces, in order. All are checked before the first byte is written: the result is -1 - i when
 * piece i lies outside a region, else the number of bytes copied, less than the sum if *cancel became
 * non-zero. */
int64_t pdmesh_copy(uint8_t *dst, int64_t dst_size, const uint8_t *src, int64_t src_size, const int64_t *dst_offset,
                    const int64_t *src_offset, const int64_t *nbytes, int64_t n, const int32_t *cancel) {
    for (int64_t i = 0; i < n; i++) {
        int64_t len = nbytes[i];
        if (len < 0 || dst_offset[i] < 0 || src_offset[i] < 0 || len > dst_size || len > src_size ||
            dst_offset[i] > dst_size - len || src_offset[i] > src_size - len)
            return -1 - i;
    }
    int64_t copied = 0, unseen = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t at = 0; at < nbytes[i];) {
            int64_t len = nbytes[i] - at < STEP ? nbytes[i] - at : STEP;
            if (unseen == 0 && __atomic_load_n(cancel, __ATOMIC_ACQUIRE))
                return copied;
            memcpy(dst + dst_offset[i] + at, src + src_offset[i] + at, (size_t)len);
            at += len;
            copied += len;
            unseen = unseen + len < STEP ? unseen + len : 0;
        }
    }
    return copied;
}
