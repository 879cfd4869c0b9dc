"""Jobs and comparisons that check the untouched model in FP32."""
