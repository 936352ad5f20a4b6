"""What the classes `jobs` and `groups` share: who leases records, what is killed meanwhile, and the judge."""
