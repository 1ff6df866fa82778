/* Which positions of a sequence to unmask together, from a program without Python.
 *
 *   folder=$(python -c 'import mdmi_fast, pathlib; print(pathlib.Path(mdmi_fast.__file__).parent)')
 *   cc select.c -I"$folder" -L"$folder" -lmdmi_fast -Wl,-rpath,"$folder" -o select && ./select
 */
#include <stdio.h>

#include "mdmi_fast.h"

int main(void) {
  const float logits[3][4] = {{0, 1, 2, 3}, {9, 0, 0, 0}, {0, 0, 4, 0}};
  const float mi[9] = {0, 0.1f, 0.9f, 0.1f, 0, 0, 0.9f, 0, 0};
  const double gamma = 1.5;
  float entropy[3];
  uint8_t selected[3];
  double spent;
  if (mdmi_token_stats(&logits[0][0], 3, 4, entropy, NULL, NULL, 1) != 0 ||
      mdmi_select_budget(1, 3, entropy, mi, NULL, &gamma, 1.0, 1.0, MDMI_ORDER_ENTROPY, MDMI_NO_LIMIT, selected, &spent,
                         1) != 0) {
    fprintf(stderr, "%s\n", mdmi_last_error());
    return 1;
  }
  for (int i = 0; i < 3; ++i) printf("%d %.6f\n", selected[i], entropy[i]);
  printf("%.6f\n", spent);
  return 0;
}
