/* Choosing positions and scoring pairs, for programs without Python: link libmdmi_fast.so, which is installed beside
 * this header in the folder of the Python package.
 *
 * Arrays are contiguous, the last axis fastest, and begin where their elements may (a multiple of 8 bytes for double
 * and int64_t, of 4 for float). None may be NULL unless it has no elements or is said to be optional here, and none
 * that a function writes may overlap another one. mask is 1 where a position is masked (to be decoded), or NULL: all
 * are. Entropies and mutual information are in nats. Every result is fully written. threads is how many threads to use,
 * at most 1024 of them. n is at most 2147483647.
 *
 * Each function returns 0, or -1 for an argument that makes no sense, such as NULL or sizes whose product no memory
 * holds, for NaN at a masked position, or where memory is short. mdmi_last_error then says what was wrong, on the same
 * thread, and what the function would have written is undefined. Ties go to the lower index; rows of a batch do not
 * depend on each other. The rules are those of mdmi_fast.ops, whose documentation says more. */
#ifndef MDMI_FAST_H_
#define MDMI_FAST_H_

#include <stdint.h>

#define MDMI_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum { MDMI_NO_LIMIT = 0 };
enum { MDMI_ORDER_ENTROPY = 0, MDMI_ORDER_CHEAPEST = 1 };
enum { MDMI_SYMMETRY_NONE = 0, MDMI_SYMMETRY_MEAN = 1, MDMI_SYMMETRY_UPPER = 2 };
enum { MDMI_COMBINE_ADD = 0, MDMI_COMBINE_MULTIPLY = 1 };
enum { MDMI_ACTIVATION_IDENTITY = 0, MDMI_ACTIVATION_SOFTPLUS = 1 };

/* Why the last call of this thread failed; valid until its next call. */
MDMI_API const char* mdmi_last_error(void);

/* logits [rows, vocabulary], vocabulary at least 1; entropy, confidence (largest probability) and token (its lowest
 * index) are [rows], each may be NULL. A row with NaN or +inf, or of -inf only, is NaN in entropy and confidence. */
MDMI_API int mdmi_token_stats(const float* logits, int64_t rows, int64_t vocabulary, float* entropy, float* confidence,
                              int64_t* token, int threads);

/* Greedy: cost_i = entropy_weight H_i + lam sum of max(mi[i, j], 0) over the chosen j, while the costs fit gamma
 * [batch], each at least 0, inf for no budget; one position of every row is always taken. entropy [batch, n], mi
 * [batch, n, n], selected [batch, n] 0 or 1, spent [batch]. At most `limit` positions a row, or MDMI_NO_LIMIT. */
MDMI_API int mdmi_select_budget(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                                const double* gamma, double lam, double entropy_weight, int order, int64_t limit,
                                uint8_t* selected, double* spent, int threads);

/* By entropy, ascending: a position joins if max(mi[i, j], mi[j, i]) < tau for every chosen j. */
MDMI_API int mdmi_select_threshold(int64_t batch, int64_t n, const float* entropy, const float* mi, const uint8_t* mask,
                                   double tau, int64_t limit, uint8_t* selected, double* spent, int threads);

/* group [batch, n]: few groups without a pair of max(mi[i, j], mi[j, i]) >= tau, numbered from 0; -1 where not masked.
 */
MDMI_API int mdmi_color(int64_t batch, int64_t n, const float* mi, const uint8_t* mask, double tau, int64_t* group,
                        int threads);

/* The network of mdmi_score_pairs: z = relu(u_i + v_j) or u_i * v_j, then z = relu(z W + b) for each layer, then
 * activation(z w_out + b_out). widths holds n_layers + 1 numbers: of u and v, and of every layer; weights[k] is
 * [widths[k], widths[k + 1]], biases[k] [widths[k + 1]], w_out [widths[n_layers]]; without layers, weights and biases
 * may be NULL. Weights are copied. Returns NULL on failure. mdmi_network_free ends the network, which nothing may use
 * afterwards; it takes NULL, too. */
typedef struct mdmi_network mdmi_network;
MDMI_API mdmi_network* mdmi_network_new(int64_t n_layers, const int64_t* widths, const float* const* weights,
                                        const float* const* biases, const float* w_out, float b_out);
MDMI_API void mdmi_network_free(mdmi_network* network);

/* From now on the scores of the network are activation(z w_out + b_out + shift[r]), r the relation of the pair:
 * relation [n, n], in 0 .. count - 1, for sequences of n positions; or, where relation is NULL, the distance: min(|i -
 * j|, count)
 * - 1, for any n. shift is [count]; count 0 takes it away again. Both are copied. Not while another thread scores. */
MDMI_API int mdmi_network_shift(mdmi_network* network, int64_t count, const float* shift, int64_t n,
                                const int32_t* relation);

/* u and v [batch, n, widths[0]]; scores [batch, n, n]: 0 on the diagonal and where an end is not masked. */
MDMI_API int mdmi_score_pairs(const mdmi_network* network, int64_t batch, int64_t n, const float* u, const float* v,
                              const uint8_t* mask, int symmetry, int combine, int activation, float* scores,
                              int threads);

#ifdef __cplusplus
}
#endif

#endif /* MDMI_FAST_H_ */
