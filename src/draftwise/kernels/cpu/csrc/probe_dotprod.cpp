#define DW_PROBE_TABLE probe_dotprod
#include "probe_arm.h"
