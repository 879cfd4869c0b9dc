"""What rounding the operands of single nodes does: steep functions, whole numbers, columns, poles."""
