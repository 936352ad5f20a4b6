"""What several tests share. Test modules and conftest files are imported by nobody."""
